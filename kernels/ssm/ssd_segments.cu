// The calls for segments of a sequence (ssm.h): decays of chunks and of whole segments, the
// correction of stored states, and the scan over segments. The last reads what a rank has gathered
// once; the correction reads and writes the states of as many chunks as `end` reaches.
#include "kernels/ssm/ssd_segments.h"

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/pack.cuh"
#include "kernels/ssm/ssd_problem.cuh"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr float kNegligible = 0x1p-40f;
constexpr int kAhead = 4;  // chunks whose states a thread loads before it uses the first

// decays[b, chunk, h]: a chunk's decays multiplied, 0 where a document begins in it. A warp takes
// one.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    ChunkDecaysKernel(const __grid_constant__ SsdProblem<T> p, float* decays) {
  const int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (i >= p.samples * p.chunks * p.heads) return;
  const int64_t h = i % p.heads, chunk = i / p.heads % p.chunks, b = i / p.heads / p.chunks;
  const int64_t begin = chunk * p.chunk, end = min(p.positions, begin + p.chunk);
  float sum = 0;
  bool begins = false;
  for (int64_t t = begin + threadIdx.x % kWarp; t < end; t += kWarp) {
    sum += SsdStep(p, b, t, h).size;
    begins = begins || p.BeginsDocument(b, t);
  }
  sum = WarpSum(sum);
  begins = __any_sync(0xffffffffu, begins);
  if (threadIdx.x % kWarp == 0) decays[i] = begins ? 0 : expf(-expf(p.a_log[h]) * sum);
}

__global__ void __launch_bounds__(kThreads)
    DecaysKernel(const float* of_chunks, int64_t samples, int64_t chunks, int64_t heads,
                 float* decays) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= samples * heads) return;
  const float* const own = of_chunks + i / heads * chunks * heads + i % heads;
  float decay = 1;
#pragma unroll 8
  for (int64_t chunk = 0; chunk < chunks; ++chunk) decay *= own[chunk * heads];
  decays[i] = decay;
}

// A thread takes kPack elements of the state of a head, through the chunks.
template <typename S, int kPack>
__global__ void __launch_bounds__(kThreads)
    CorrectKernel(const float* decays, int64_t samples, int64_t chunks, int64_t heads, int64_t size,
                  const float* ends, bool reverse, S* states) {
  const int64_t own = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t packs = size / kPack;
  if (own >= samples * heads * packs) return;
  const int64_t element = own % packs * kPack, h = own / packs % heads, b = own / packs / heads;
  float end[kPack];
  LoadFloats<kPack>(ends + (b * heads + h) * size + element, end);
  float left = 1;
  for (int64_t i = 0; i < chunks && left > kNegligible; i += kAhead) {
    S* at[kAhead];
    float sums[kAhead][kPack], factors[kAhead];
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= chunks) continue;
      const int64_t chunk = reverse ? chunks - 1 - i - j : i + j;
      const int64_t place = (b * chunks + chunk) * heads + h;
      at[j] = states + place * size + element;
      LoadFloats<kPack>(at[j], sums[j]);
      factors[j] = decays[place];
    }
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      if (i + j >= chunks) continue;
#pragma unroll
      for (int k = 0; k < kPack; ++k) sums[j][k] += left * end[k];
      StorePack<kPack>(at[j], FromFloats<S>(sums[j]));
      left *= factors[j];
    }
  }
}

// A thread takes kPack elements of the state of a head of one sequence, through its segments.
template <int kPack>
__global__ void __launch_bounds__(kThreads)
    PassKernel(const float* states, int64_t states_stride, const float* decays,
               int64_t decays_stride, int ranks, int rank, bool reverse, int64_t sequences,
               int64_t heads, int64_t size, float* own) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t packs = size / kPack;
  if (at >= sequences * heads * packs) return;
  const int64_t element = at % packs * kPack, h = at / packs % heads, b = at / packs / heads;
  float sum[kPack] = {};
  for (int i = 0; i < 2 * ranks; ++i) {
    const int segment = reverse ? 2 * ranks - 1 - i : i;
    const int late = segment < ranks ? 0 : 1;
    const int from = late == 0 ? segment : 2 * ranks - 1 - segment;
    const int64_t row = (2 * b + late) * heads + h;
    if (from == rank) StorePack<kPack>(own + row * size + element, FromFloats<float>(sum));
    const float decay = decays[from * decays_stride + row];
    float left[kPack];
    LoadFloats<kPack>(states + from * states_stride + row * size + element, left);
#pragma unroll
    for (int j = 0; j < kPack; ++j) sum[j] = decay * sum[j] + left[j];
  }
}

__global__ void __launch_bounds__(kThreads)
    SegmentDocumentsKernel(const int32_t* documents, int64_t stride, int rank, int64_t samples,
                           int64_t length, int64_t segments, int32_t* own, int64_t own_stride) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= samples * length) return;
  const int64_t row = i / length, t = i % length;
  const int64_t begin = (row % 2 == 0 ? rank : segments - 1 - rank) * length;
  own[row * own_stride + t] = documents[row / 2 * stride + begin + t] - static_cast<int32_t>(begin);
}

unsigned Blocks(int64_t threads) { return static_cast<unsigned>(CeilDiv(threads, kThreads)); }

// The decays of chunks, at the front of the stream's scratch memory; null after failing it.
float* ChunkDecays(CudaStream& stream, const SsdArgs& args) {
  const int64_t chunks = CeilDiv(args.x.dim(1), args.chunk);
  const int64_t count = args.x.dim(0) * chunks * args.x.dim(2);
  auto* const decays = static_cast<float*>(stream.Scratch(count * 4));
  if (decays == nullptr) return nullptr;
  DispatchFloat(args.x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    ChunkDecaysKernel<T>
        <<<Blocks(count * kWarp), kThreads, 0, stream.handle()>>>(DescribeSsd<T>(args), decays);
  });
  return decays;
}

// Calls f(elements of a pack, as a constant).
template <typename F>
void ForPacks(int64_t size, const void* a, const void* b, F f) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  if (size % 4 == 0 && aligned(a) && aligned(b)) return f(std::integral_constant<int, 4>());
  f(std::integral_constant<int, 1>());
}

}  // namespace

void SsdDecays(CudaStream& stream, const SsdArgs& args) {
  const float* const of_chunks = ChunkDecays(stream, args);
  if (of_chunks == nullptr) return;
  const int64_t samples = args.x.dim(0), heads = args.x.dim(2);
  DecaysKernel<<<Blocks(samples * heads), kThreads, 0, stream.handle()>>>(
      of_chunks, samples, CeilDiv(args.x.dim(1), args.chunk), heads, args.decay.f32());
}

void SsdCorrect(CudaStream& stream, const SsdArgs& args, const Tensor& end, bool reverse,
                const Tensor& states) {
  const float* const decays = ChunkDecays(stream, args);
  if (decays == nullptr) return;
  const int64_t samples = args.x.dim(0), heads = args.x.dim(2);
  const int64_t chunks = CeilDiv(args.x.dim(1), args.chunk), size = states.dim(3);
  ForPacks(size, states.data(), end.data(), [&](auto pack) {
    DispatchFloat(states.dtype(), [&](auto tag) {
      using S = decltype(tag);
      CorrectKernel<S, pack()>
          <<<Blocks(samples * heads * size / pack()), kThreads, 0, stream.handle()>>>(
              decays, samples, chunks, heads, size, end.f32(), reverse, states.as<S>());
    });
  });
}

void SsdPassStates(Stream& stream, const SsdPassArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  const Tensor& own = args.own;
  if (own.elements() == 0) return;
  const int64_t sequences = own.dim(0) / 2, heads = own.dim(1), size = own.dim(2) * own.dim(3);
  const int64_t stride = args.states.stride(0);
  ForPacks(stride % 4 == 0 ? size : 1, args.states.data(), own.data(), [&](auto pack) {
    PassKernel<pack()><<<Blocks(sequences * heads * size / pack()), kThreads, 0, cuda.handle()>>>(
        args.states.f32(), stride, args.decays.f32(), args.decays.stride(0),
        static_cast<int>(args.states.dim(0)), args.rank, args.reverse, sequences, heads, size,
        own.f32());
  });
  cuda.CheckLaunch("SsdPassStates");
}

void SegmentDocuments(Stream& stream, const SegmentDocumentsArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t samples = args.own.dim(0), length = args.own.dim(1);
  if (samples == 0) return;
  SegmentDocumentsKernel<<<Blocks(samples * length), kThreads, 0, cuda.handle()>>>(
      args.documents.as<int32_t>(), args.documents.stride(0), args.rank, samples, length,
      args.documents.dim(1) / length, args.own.as<int32_t>(), args.own.stride(0));
  cuda.CheckLaunch("SegmentDocuments");
}

}  // namespace muster::kernels::cuda
