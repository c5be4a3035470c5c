// Grouping of tokens: a stable radix sort, lowest digits first, with at most 512 values a digit, so
// that vocabularies of up to 2^18 take two passes. The first kernel counts the digits of each
// block's tokens. Each further one sorts by one digit and counts the next digit of what it has
// placed, for the block that will read it. The counts are integers and determine every place, so
// nothing depends on the order in which blocks run. Latency matters here, not bytes (20 a token):
// there are at most kBlocks blocks, so that each can add up the counts of all.
#include <algorithm>
#include <bit>

#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/embedding/embedding.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kBlocks = 64;
constexpr int kMinDigitBits = 5;  // so that a warp adds up counts of distinct digits
constexpr int kMaxDigitBits = 9;
constexpr int kMaxBins = 1 << kMaxDigitBits;

struct Tiles {
  int n, rows, blocks;  // block b: tokens [b * rows, +rows)
  int digit_bits;
  __device__ int Begin() const { return blockIdx.x * rows; }
  __device__ int End() const { return min(n, static_cast<int>(blockIdx.x + 1) * rows); }
  __host__ __device__ int bins() const { return 1 << digit_bits; }
  __device__ int Digit(int key, int pass) const {
    return key >> (pass * digit_bits) & (bins() - 1);
  }
};

// Tokens that are no row of the table are sorted last.
__device__ inline int KeyOf(int32_t token, int vocab) {
  return token >= 0 && token < vocab ? token : vocab;
}

// Writes the counts [blocks][bins] of the first digit, and zeroes those of `other_passes` further
// digits behind them.
__global__ void __launch_bounds__(kThreads)
    CountKernel(const Tiles tiles, const int32_t* tokens, int vocab, int other_passes,
                int32_t* counts) {
  __shared__ int count[kMaxBins];
  const int bins = tiles.bins();
  for (int d = threadIdx.x; d < bins; d += kThreads) count[d] = 0;
  __syncthreads();
  for (int i = tiles.Begin() + threadIdx.x; i < tiles.End(); i += kThreads) {
    atomicAdd(&count[tiles.Digit(KeyOf(tokens[i], vocab), 0)], 1);
  }
  __syncthreads();
  for (int d = threadIdx.x; d < bins; d += kThreads) {
    int32_t* at = counts + blockIdx.x * bins + d;
    *at = count[d];
    for (int p = 0; p < other_passes; ++p) *(at += tiles.blocks * bins) = 0;
  }
}

// place[digit] becomes where this block's first key of that digit goes: behind all smaller digits
// and the same digit in the blocks before.
__device__ void FirstPlaces(const Tiles& tiles, const int32_t* counts, int* place) {
  __shared__ int all[kThreads], in_front[kThreads];  // [groups of blocks][bins]
  __shared__ int warp_sum[kMaxBins / kWarp];
  const int bins = tiles.bins(), groups_of_blocks = kThreads / bins;
  const int thread = threadIdx.x, digit = thread & (bins - 1);
  int sum = 0, front = 0;
#pragma unroll 8
  for (int b = thread / bins; b < tiles.blocks; b += groups_of_blocks) {
    const int count = counts[b * bins + digit];
    sum += count;
    if (b < static_cast<int>(blockIdx.x)) front += count;
  }
  all[thread] = sum;
  in_front[thread] = front;
  __syncthreads();
  int total = 0, before = 0, up_to = 0;
  if (thread < bins) {
    for (int p = 0; p < groups_of_blocks; ++p) {
      total += all[p * bins + thread];
      before += in_front[p * bins + thread];
    }
    up_to = total;  // becomes the sum with the digits before it in this warp
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int left = __shfl_up_sync(0xffffffffu, up_to, offset);
      if (thread % kWarp >= offset) up_to += left;
    }
    if (thread % kWarp == kWarp - 1) warp_sum[thread / kWarp] = up_to;
  }
  __syncthreads();
  if (thread < bins) {
    for (int w = 0; w < thread / kWarp; ++w) before += warp_sum[w];
    place[thread] = before + up_to - total;
  }
}

// One pass. In the first one `keys` are the tokens and `from` is nullptr; then `keys` are sorted by
// the lower digits, and `from` holds the index of each in the tokens.
__global__ void __launch_bounds__(kThreads)
    PlaceKernel(const Tiles tiles, int pass, const int32_t* keys, const int32_t* from, int vocab,
                const int32_t* counts, int32_t* next_counts, int32_t* keys_out, int32_t* from_out) {
  __shared__ int place[kMaxBins];
  __shared__ uint16_t in_warp[kWarps][kMaxBins];  // keys of a digit, then those in warps before
  const int bins = tiles.bins();
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
  FirstPlaces(tiles, counts, place);
  for (int begin = tiles.Begin(); begin < tiles.End(); begin += kThreads) {
    for (int w = 0; w < kWarps; ++w) {
      if (thread < bins) in_warp[w][thread] = 0;
    }
    __syncthreads();
    const int i = begin + thread;
    const bool active = i < tiles.End();
    int key = 0, position = i;
    if (active) {
      key = from == nullptr ? KeyOf(keys[i], vocab) : keys[i];
      if (from != nullptr) position = from[i];
    }
    const int digit = active ? tiles.Digit(key, pass) : bins;
    const unsigned same = __match_any_sync(0xffffffffu, digit);
    const int rank = __popc(same & ((1u << lane) - 1));
    if (active && rank == 0) in_warp[warp][digit] = static_cast<uint16_t>(__popc(same));
    __syncthreads();
    int sum = 0;
    if (thread < bins) {
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const int count = in_warp[w][thread];
        in_warp[w][thread] = static_cast<uint16_t>(sum);
        sum += count;
      }
    }
    __syncthreads();
    if (active) {
      const int to = place[digit] + in_warp[warp][digit] + rank;
      keys_out[to] = key;
      from_out[to] = position;
      if (next_counts != nullptr) {
        atomicAdd(&next_counts[to / tiles.rows * bins + tiles.Digit(key, pass + 1)], 1);
      }
    }
    __syncthreads();
    if (thread < bins) place[thread] += sum;
  }
}

}  // namespace

void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int n = static_cast<int>(tokens.elements());
  if (n == 0) return;
  const int key_bits = std::max<int>(kMinDigitBits, std::bit_width(static_cast<uint64_t>(vocab)));
  const int passes = static_cast<int>(CeilDiv(key_bits, kMaxDigitBits));
  Tiles tiles;
  tiles.n = n;
  tiles.rows = static_cast<int>(CeilDiv(CeilDiv(n, kBlocks), kThreads)) * kThreads;
  tiles.blocks = static_cast<int>(CeilDiv(n, tiles.rows));
  tiles.digit_bits = static_cast<int>(CeilDiv(key_bits, passes));
  const int64_t counts_of_pass = int64_t{tiles.blocks} * tiles.bins();
  auto* counts = static_cast<int32_t*>(
      cuda.Scratch((passes * counts_of_pass + 2 * int64_t{n}) * sizeof(int32_t)));
  if (counts == nullptr) return;
  int32_t* const between = counts + passes * counts_of_pass;
  const auto blocks = static_cast<unsigned>(tiles.blocks);
  const auto keys = tokens.as<const int32_t>();
  CountKernel<<<blocks, kThreads, 0, cuda.handle()>>>(tiles, keys, static_cast<int>(vocab),
                                                      passes - 1, counts);
  if (!cuda.CheckLaunch("GroupTokens: count")) return;
  const int32_t* in = nullptr;  // [2,T]
  for (int pass = 0; pass < passes; ++pass, counts += counts_of_pass) {
    // Outputs alternate so that the last pass writes the result.
    int32_t* const out = (passes - 1 - pass) % 2 == 0 ? groups.as<int32_t>() : between;
    PlaceKernel<<<blocks, kThreads, 0, cuda.handle()>>>(
        tiles, pass, in == nullptr ? keys : in, in == nullptr ? nullptr : in + n,
        static_cast<int>(vocab), counts, pass + 1 < passes ? counts + counts_of_pass : nullptr, out,
        out + n);
    if (!cuda.CheckLaunch("GroupTokens: place")) return;
    in = out;
  }
}

}  // namespace muster::kernels::cuda
