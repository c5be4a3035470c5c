// Selection and packing of gradients. Counts are integers and work is split by index, so the bits
// depend neither on the order of blocks nor on the device.
//
// TakeLargest is a radix selection: three histograms of 11, 10 and 10 bits of the magnitude find
// the k-th largest, each after one pass over x; a fourth pass counts the selected elements in
// every slice of x, and a fifth takes them. Between the passes one block turns counts into places,
// so the host does not wait.
#include <algorithm>

#include "kernels/compression/compression.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/optimizer/step_math.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kPerThread = 8;
constexpr int64_t kSliceElements = kThreads * kPerThread;
constexpr int kDigits = 3;
constexpr int kBinsMax = 1 << 11;
constexpr int kPlaceThreads = 1024;

// Which elements are the largest: all above `threshold`, and the first `wanted` that equal it.
struct Selection {
  uint32_t threshold;  // its higher digits, while lower ones are being found
  int64_t wanted;
};

// Selected elements of one slice; after PlaceKernel, of all slices before it.
struct Counts {
  int64_t above, equal;
  __device__ Counts operator+(const Counts& other) const {
    return {above + other.above, equal + other.equal};
  }
};

struct Digit {
  int shift, bits;
};
__host__ __device__ constexpr Digit DigitAt(int i) {
  return i == 0 ? Digit{20, 11} : i == 1 ? Digit{10, 10} : Digit{0, 10};
}

// Ordered like |x|; NaN above everything.
__device__ uint32_t Magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__global__ void StartKernel(int64_t k, Selection* selection, uint32_t* bins) {
  if (threadIdx.x == 0) *selection = {0, k};
  for (int i = threadIdx.x; i < kBinsMax; i += blockDim.x) bins[i] = 0;
}

// Adds to the histogram the elements whose higher digits are those found so far.
__global__ void __launch_bounds__(kThreads)
    HistogramKernel(const float* x, int64_t n, Digit digit, const Selection* selection,
                    uint32_t* bins) {
  __shared__ uint32_t counts[kBinsMax];
  const int size = 1 << digit.bits;
  for (int i = threadIdx.x; i < size; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int above = digit.shift + digit.bits;
  const uint32_t prefix = selection->threshold >> above;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < n; i += step) {
    const uint32_t magnitude = Magnitude(x[i]);
    // For the highest digit both sides are 0, because magnitudes have 31 bits.
    if (magnitude >> above != prefix) continue;
    atomicAdd(&counts[magnitude >> digit.shift & (size - 1)], 1u);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < size; i += kThreads) {
    if (counts[i] != 0) atomicAdd(&bins[i], counts[i]);
  }
}

// Finds the bin that holds the wanted element, counted from the largest, and empties the bins. One
// block of kPlaceThreads.
__global__ void __launch_bounds__(kPlaceThreads)
    ChooseBinKernel(Digit digit, Selection* selection, uint32_t* bins) {
  constexpr int kEach = kBinsMax / kPlaceThreads;
  __shared__ int64_t sums[kPlaceThreads];
  const int size = 1 << digit.bits, thread = threadIdx.x;
  const int64_t wanted = selection->wanted;
  // Thread 0 has the largest bins.
  uint32_t own[kEach];
  int64_t sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int bin = size - 1 - (thread * kEach + j);
    own[j] = bin >= 0 ? bins[bin] : 0;
    sum += own[j];
  }
  sums[thread] = sum;
  __syncthreads();
  for (int offset = 1; offset < kPlaceThreads; offset *= 2) {
    const int64_t before = thread >= offset ? sums[thread - offset] : 0;
    __syncthreads();
    sums[thread] += before;
    __syncthreads();
  }
  int64_t before = sums[thread] - sum;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int bin = size - 1 - (thread * kEach + j);
    if (bin < 0) break;
    if (before < wanted && wanted <= before + own[j]) {
      selection->threshold |= static_cast<uint32_t>(bin) << digit.shift;
      selection->wanted = wanted - before;
    }
    before += own[j];
    bins[bin] = 0;
  }
}

// Calls f for this thread's elements of the block's slice. They are neighbours, so that ranks
// within a block follow from a scan over threads.
template <typename F>
__device__ void ForOwn(int64_t n, F f) {
  const int64_t begin = blockIdx.x * kSliceElements + threadIdx.x * kPerThread;
#pragma unroll
  for (int j = 0; j < kPerThread; ++j) {
    if (begin + j < n) f(begin + j, j);
  }
}

__global__ void __launch_bounds__(kThreads)
    CountKernel(const float* x, int64_t n, const Selection* selection, Counts* slices) {
  __shared__ int shared[2][kWarp];
  const uint32_t threshold = selection->threshold;
  int above = 0, equal = 0;
  ForOwn(n, [&](int64_t i, int) {
    const uint32_t magnitude = Magnitude(x[i]);
    above += magnitude > threshold ? 1 : 0;
    equal += magnitude == threshold ? 1 : 0;
  });
  above = BlockSum(above, shared[0]);
  equal = BlockSum(equal, shared[1]);
  if (threadIdx.x == 0) slices[blockIdx.x] = {above, equal};
}

// The sum over all threads before this one in the block.
template <int kWarpsOfBlock>
__device__ Counts SumInFront(Counts own, Counts* shared) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  Counts sum = own;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const Counts before = {__shfl_up_sync(0xffffffffu, sum.above, offset),
                           __shfl_up_sync(0xffffffffu, sum.equal, offset)};
    if (lane >= offset) sum = sum + before;
  }
  if (lane == kWarp - 1) shared[warp] = sum;
  __syncthreads();
  Counts in_front = {sum.above - own.above, sum.equal - own.equal};
#pragma unroll
  for (int w = 0; w < kWarpsOfBlock; ++w) {
    if (w < warp) in_front = in_front + shared[w];
  }
  __syncthreads();
  return in_front;
}

// Turns the counts of slices into those of all slices before. One block.
__global__ void __launch_bounds__(kPlaceThreads) PlaceKernel(int64_t count, Counts* slices) {
  __shared__ Counts shared[kPlaceThreads / kWarp];
  __shared__ Counts total;
  if (threadIdx.x == 0) total = {0, 0};
  __syncthreads();
  for (int64_t begin = 0; begin < count; begin += kPlaceThreads) {
    const int64_t i = begin + threadIdx.x;
    const Counts own = i < count ? slices[i] : Counts{0, 0};
    const Counts in_front = total + SumInFront<kPlaceThreads / kWarp>(own, shared);
    if (i < count) slices[i] = in_front;
    __syncthreads();
    if (threadIdx.x == kPlaceThreads - 1) total = in_front + own;
    __syncthreads();
  }
}

struct Taken {
  float* x;
  float* also;       // or nullptr
  int32_t* indices;  // with values, or nullptr
  float* values;
  float* dense;  // or nullptr
  int64_t offset;
};

__global__ void __launch_bounds__(kThreads)
    TakeKernel(int64_t n, const Selection* selection, const Counts* slices, Taken out) {
  __shared__ Counts shared[kWarps];
  const uint32_t threshold = selection->threshold;
  const int64_t ties = selection->wanted;
  float own[kPerThread] = {};
  Counts counts = {0, 0};
  ForOwn(n, [&](int64_t i, int j) {
    own[j] = out.x[i];
    counts.above += Magnitude(own[j]) > threshold ? 1 : 0;
    counts.equal += Magnitude(own[j]) == threshold ? 1 : 0;
  });
  Counts before = slices[blockIdx.x] + SumInFront<kWarps>(counts, shared);
  ForOwn(n, [&](int64_t i, int j) {
    const bool above = Magnitude(own[j]) > threshold;
    const bool equal = Magnitude(own[j]) == threshold;
    const bool taken = above || (equal && before.equal < ties);
    if (out.dense != nullptr) out.dense[i] = taken ? own[j] : 0.f;
    if (taken) {
      if (out.dense == nullptr) {
        const int64_t at = before.above + (before.equal < ties ? before.equal : ties);
        out.indices[at] = static_cast<int32_t>(out.offset + i);
        out.values[at] = own[j];
      }
      out.x[i] = 0;
      if (out.also != nullptr) out.also[i] = 0;
    }
    before.above += above ? 1 : 0;
    before.equal += equal ? 1 : 0;
  });
}

// ---- sums of sparse parts -----------------------------------------------------------------------

constexpr int kTile = kThreads * 4;

// The first of ascending `indices` [k] that is not below `value`.
__device__ int64_t LowerBound(const int32_t* indices, int64_t k, int64_t value) {
  int64_t begin = 0, end = k;
  while (begin < end) {
    const int64_t middle = (begin + end) / 2;
    if (indices[middle] < value) {
      begin = middle + 1;
    } else {
      end = middle;
    }
  }
  return begin;
}

// A block takes a tile. It scatters each part into a row of shared memory and merges rows of equal
// subtrees at once, as SumAsTree does. A thread merges its own columns, so only the scatter needs
// barriers.
__global__ void __launch_bounds__(kThreads)
    SumSparseKernel(const int32_t* entries, int64_t parts, int64_t k, int64_t first, int64_t n,
                    float* out) {
  extern __shared__ float rows[];  // [levels + 1][kTile]
  __shared__ int64_t range[2];
  const int64_t begin = blockIdx.x * int64_t{kTile};
  int depth = 0;
  const auto merge = [&] {
    for (int i = threadIdx.x; i < kTile; i += kThreads) {
      rows[(depth - 2) * kTile + i] += rows[(depth - 1) * kTile + i];
    }
    --depth;
  };
  for (int64_t part = 0; part < parts; ++part) {
    const int32_t* indices = entries + part * 2 * k;
    const auto* values = reinterpret_cast<const float*>(indices + k);
    float* row = rows + depth * kTile;
    for (int i = threadIdx.x; i < kTile; i += kThreads) row[i] = 0;
    if (threadIdx.x < 2) {
      range[threadIdx.x] = LowerBound(indices, k, first + begin + threadIdx.x * int64_t{kTile});
    }
    __syncthreads();
    for (int64_t i = range[0] + threadIdx.x; i < range[1]; i += kThreads) {
      row[indices[i] - first - begin] = values[i];
    }
    __syncthreads();
    ++depth;
    for (int64_t bits = part; (bits & 1) != 0; bits >>= 1) merge();
  }
  while (depth > 1) merge();
  for (int i = threadIdx.x; i < kTile && begin + i < n; i += kThreads) out[begin + i] = rows[i];
}

// ---- signs --------------------------------------------------------------------------------------

constexpr int kSumThreads = 512;

__global__ void __launch_bounds__(kSumThreads)
    SumMagnitudesKernel(const float* x, int64_t n, double* partial) {
  __shared__ double shared[kWarp];
  const int64_t step = static_cast<int64_t>(gridDim.x) * kSumThreads;
  double sum = 0;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kSumThreads + threadIdx.x; i < n; i += step) {
    sum += fabsf(x[i]);
  }
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(kSumThreads)
    MeanKernel(const double* partial, int partials, int64_t n, float* mean) {
  __shared__ double shared[kWarp];
  double sum = 0;
  for (int i = threadIdx.x; i < partials; i += kSumThreads) sum += partial[i];
  sum = BlockSum(sum, shared);
  if (threadIdx.x == 0) *mean = static_cast<float>(sum / static_cast<double>(n));
}

// A warp per word.
__global__ void __launch_bounds__(kThreads)
    TakeSignsKernel(float* x, int64_t n, const float* mean, uint32_t* words) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const float value = i < n ? x[i] : 0.f;
  const bool negative = signbit(value);
  const uint32_t word = __ballot_sync(0xffffffffu, negative);
  if (i >= n) return;
  if (threadIdx.x % kWarp == 0) words[i / kWarp] = word;
  x[i] = value - (negative ? -*mean : *mean);
}

struct SumSignsElements {
  const int32_t* packed;
  int64_t stride, parts, first;
  float* out;

  template <int N>
  __device__ void Apply(int64_t i) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const int64_t at = first + i + j;
      out[i + j] = SumAsTree(parts, [&](int64_t part) {
        const int32_t* words = packed + part * stride;
        const float scale = __int_as_float(words[0]);
        const auto word = static_cast<uint32_t>(words[1 + at / 32]);
        return (word >> (at % 32) & 1) != 0 ? -scale : scale;
      });
    }
  }
};

unsigned Blocks(int64_t n, int64_t per_block) {
  return static_cast<unsigned>(CeilDiv(n, per_block));
}

}  // namespace

void TakeLargest(Stream& stream, const TakeLargestArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t n = args.x.elements(), slices = CeilDiv(n, kSliceElements);
  struct Memory {
    Selection selection;
    uint32_t bins[kBinsMax];
  };
  const int64_t counts_bytes = slices * static_cast<int64_t>(sizeof(Counts));
  auto* scratch = static_cast<char*>(cuda.Scratch(counts_bytes + sizeof(Memory)));
  if (scratch == nullptr) return;
  auto* counts = reinterpret_cast<Counts*>(scratch);
  auto* memory = reinterpret_cast<Memory*>(scratch + counts_bytes);
  Selection* selection = &memory->selection;
  const float* x = args.x.f32();
  StartKernel<<<1, kPlaceThreads, 0, cuda.handle()>>>(args.k, selection, memory->bins);
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(
      CeilDiv(n, kSliceElements), int64_t{8} * cuda.cuda_device().multiprocessors()));
  for (int i = 0; i < kDigits; ++i) {
    HistogramKernel<<<blocks, kThreads, 0, cuda.handle()>>>(x, n, DigitAt(i), selection,
                                                            memory->bins);
    ChooseBinKernel<<<1, kPlaceThreads, 0, cuda.handle()>>>(DigitAt(i), selection, memory->bins);
  }
  const unsigned grid = Blocks(n, kSliceElements);
  CountKernel<<<grid, kThreads, 0, cuda.handle()>>>(x, n, selection, counts);
  PlaceKernel<<<1, kPlaceThreads, 0, cuda.handle()>>>(slices, counts);
  const bool dense = !args.dense.empty();
  const Taken out = {args.x.f32(),
                     args.also.empty() ? nullptr : args.also.f32(),
                     dense ? nullptr : args.indices.as<int32_t>(),
                     dense ? nullptr : args.values.f32(),
                     dense ? args.dense.f32() : nullptr,
                     args.offset};
  TakeKernel<<<grid, kThreads, 0, cuda.handle()>>>(n, selection, counts, out);
  cuda.CheckLaunch("TakeLargest");
}

void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t parts = entries.dim(0), n = out.elements();
  if (n == 0) return;
  int64_t levels = 1;
  for (int64_t rest = parts; rest > 1; rest = (rest + 1) / 2) ++levels;
  const int64_t bytes = (levels + 1) * kTile * static_cast<int64_t>(sizeof(float));
  // Up to 48 KiB, which is enough for 1024 parts, need no attribute.
  if (bytes > 48 << 10 &&
      !cuda.Check(cudaFuncSetAttribute(SumSparseKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                       static_cast<int>(bytes)),
                  "SumSparse")) {
    return;
  }
  SumSparseKernel<<<Blocks(n, kTile), kThreads, bytes, cuda.handle()>>>(
      entries.as<int32_t>(), parts, entries.dim(2), first, n, out.f32());
  cuda.CheckLaunch("SumSparse");
}

void TakeSigns(Stream& stream, Tensor x, Tensor packed) {
  CudaStream& cuda = CudaStream::Of(stream);
  const int64_t n = x.elements();
  const auto blocks = static_cast<int>(std::min<int64_t>(
      CeilDiv(n, kSumThreads * 4), int64_t{4} * cuda.cuda_device().multiprocessors()));
  auto* partial = static_cast<double*>(cuda.Scratch(blocks * sizeof(double)));
  if (partial == nullptr) return;
  auto* mean = static_cast<float*>(packed.data());
  SumMagnitudesKernel<<<blocks, kSumThreads, 0, cuda.handle()>>>(x.f32(), n, partial);
  MeanKernel<<<1, kSumThreads, 0, cuda.handle()>>>(partial, blocks, n, mean);
  TakeSignsKernel<<<Blocks(n, kThreads), kThreads, 0, cuda.handle()>>>(
      x.f32(), n, mean, reinterpret_cast<uint32_t*>(packed.as<int32_t>() + 1));
  cuda.CheckLaunch("TakeSigns");
}

void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out) {
  Elementwise<1>(
      CudaStream::Of(stream), "SumSigns", out.elements(), {},
      SumSignsElements{packed.as<int32_t>(), packed.stride(0), packed.dim(0), first, out.f32()});
}

}  // namespace muster::kernels::cuda
