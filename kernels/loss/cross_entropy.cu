// Cross-entropy with the gradient written over the logits.
// A block takes a row: it reads the row once into shared memory while it finds the maximum, sums
// the exponentials from there, and writes the gradient. So [T,V] is read once and written once.
// Rows that do not fit into shared memory (128 k columns of 16 bits do not) are split over the
// blocks of a cluster. Where the device has no clusters, or a row is too long for eight blocks, a
// block keeps a running maximum and sum, and reads the row a second time from the L2 cache, which
// holds the rows of all blocks that run at once. Rows that are not aligned are read three times.
// Over a vocabulary that is sharded over ranks, the logits are read once for the statistics, with a
// running maximum and sum, then read and written once for the gradient.
#include <type_traits>

#include "kernels/cuda/cluster_launch.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/overlap.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/loss/cross_entropy.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kLongRowThreads = 1024;
constexpr int kPacksInFlight = 4;
constexpr int kShardsMax = 8;  // blocks of a portable cluster
constexpr int kBlocksPerProcessor = 3;
constexpr float kLog2E = 1.4426950408889634f;

template <typename T>
struct Data {
  T* logits;
  const int32_t* targets;
  float* losses;
  int columns;
  int vocab;
  float scale;
  const float* loss_scale;  // or nullptr
  bool write_gradient;

  __device__ float Scale() const { return loss_scale == nullptr ? scale : scale * *loss_scale; }
};

// 2^x in one instruction. Unlike exp2f it flushes denormal results to 0, which does not matter
// beside the maximum's 1.
__device__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The maximum of a pack; 16-bit values are compared two at a time, which is exact.
template <int N>
__device__ float MaxOf(const Pack<float, N>& pack) {
  float max = pack[0];
#pragma unroll
  for (int i = 1; i < N; ++i) max = fmaxf(max, pack[i]);
  return max;
}
template <typename T, typename T2, int N>
__device__ float MaxOfPairs(const Pack<T, N>& pack) {
  T2 max, pair;
  memcpy(&max, &pack.words[0], sizeof(max));
#pragma unroll
  for (int i = 1; i < N / 2; ++i) {
    memcpy(&pair, &pack.words[i], sizeof(pair));
    max = __hmax2_nan(max, pair);
  }
  return ToFloat(__hmax_nan(max.x, max.y));
}
template <int N>
__device__ float MaxOf(const Pack<__nv_bfloat16, N>& pack) {
  return MaxOfPairs<__nv_bfloat16, __nv_bfloat162>(pack);
}
template <int N>
__device__ float MaxOf(const Pack<__half, N>& pack) {
  return MaxOfPairs<__half, __half2>(pack);
}

// NaN for a target that is not in the vocabulary, so that wrong data do not go unnoticed.
template <typename T>
__device__ float Loss(int target, int vocab, const T* row, float max, float sum) {
  if (target < 0) return 0;
  return target < vocab ? max + logf(sum) - ToFloat(row[target]) : NAN;
}

template <typename T>
__global__ void __launch_bounds__(kThreads) CachedRowKernel(const Data<T> d) {
  constexpr int N = kPackSize<T>;
  extern __shared__ uint4 cached_row[];
  T* const cache = reinterpret_cast<T*>(cached_row);
  __shared__ float shared[2][kWarp];
  T* const row = d.logits + static_cast<int64_t>(blockIdx.x) * d.columns;
  const int target = d.targets[blockIdx.x];
  const int packs = d.columns / N;
  float max = -INFINITY;
  for (int p = threadIdx.x; p < packs; p += kThreads * kPacksInFlight) {
    Pack<T, N> loaded[kPacksInFlight];
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int at = p + k * kThreads;
      if (at < packs) loaded[k] = LoadPack<N>(row + at * N);
    }
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int at = p + k * kThreads;
      if (at >= packs) continue;
      if (at * N + N > d.vocab) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
          // The exponential of padding, and hence its gradient, becomes 0.
          if (at * N + i >= d.vocab) loaded[k].Set(i, FromFloat<T>(-INFINITY));
        }
      }
      max = fmaxf(max, MaxOf(loaded[k]));
      StorePack<N>(cache + at * N, loaded[k]);
    }
  }
  max = BlockMax(max, shared[0]);  // its barrier also makes the whole row visible
  const float max_log2 = max * kLog2E;
  float sum = 0;
  for (int p = threadIdx.x; p < packs; p += kThreads) {
    float v[N];
    LoadFloats<N>(cache + p * N, v);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += Exp2(v[i] * kLog2E - max_log2);
  }
  sum = BlockSum(sum, shared[1]);
  if (threadIdx.x == 0) {
    d.losses[blockIdx.x] = Loss(target, d.vocab, cache, max, sum);
  }
  if (!d.write_gradient) return;
  // The factor scale / sum goes into the exponent; masked rows get exp2(-infinity) = 0.
  const float scale = d.Scale();
  const float offset = target < 0 ? INFINITY : max_log2 - log2f(scale / sum);
  for (int p = threadIdx.x; p < packs; p += kThreads) {
    float v[N];
    LoadFloats<N>(cache + p * N, v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = Exp2(v[i] * kLog2E - offset);
    if (p == target / N && target >= 0) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (i == target % N) v[i] -= scale;
      }
    }
    StorePack<N>(row + p * N, FromFloats<T>(v));
  }
}

// ---- rows over the blocks of a cluster ----

#if __CUDA_ARCH__ >= 900
// Nothing may be written into the memory of a cluster's blocks before all of them have started. A
// block arrives, goes on with work of its own, and waits for the others later.
__device__ void ClusterStarted() { asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory"); }
__device__ void WaitForCluster() { asm volatile("barrier.cluster.wait;" ::: "memory"); }
// Stores to the same place in the shared memory of block `rank` of the cluster.
__device__ void StoreAt(float2* place, int rank, float2 value) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "st.shared::cluster.v2.f32 [remote], {%2, %3};\n"
      "}\n" ::"r"(hopper::SharedAddress(place)),
      "r"(rank), "f"(value.x), "f"(value.y)
      : "memory");
}
#endif

// A row is split over `shards` blocks, each of which holds shard_packs packs of it in shared
// memory. Blocks exchange their maximum and sum.
template <typename T, int kBlock = kThreads, int kBlocks = kBlocksPerProcessor>
__global__ void __launch_bounds__(kBlock, kBlocks)
    ClusterRowKernel(const Data<T> d, int shards, int shard_packs) {
#if __CUDA_ARCH__ >= 900
  constexpr int N = kPackSize<T>;
  extern __shared__ uint4 cached_row[];
  T* const cache = reinterpret_cast<T*>(cached_row);
  __shared__ float shared[2][kWarp];
  __shared__ float2 statistics[kShardsMax];
  ClusterStarted();
  const int shard = static_cast<int>(hopper::ClusterRank());
  const int at_row = static_cast<int>(blockIdx.x) / shards, begin = shard * shard_packs * N;
  T* const row = d.logits + static_cast<int64_t>(at_row) * d.columns + begin;
  const int packs = min(shard_packs, (d.columns - begin) / N);
  for (int p = threadIdx.x; p < packs; p += kBlock) CopyAsync16(cache + p * N, row + p * N);
  CommitCopies();
  const int target = d.targets[at_row];
  const int vocab = d.vocab - begin;
  float max = -INFINITY;
  WaitCopies<0>();
  for (int p = threadIdx.x; p < packs; p += kBlock) {
    Pack<T, N> loaded = LoadPack<N>(cache + p * N);
    if (p * N + N > vocab) {
#pragma unroll
      for (int i = 0; i < N; ++i) {
        // The exponential of padding, and hence its gradient, becomes 0.
        if (p * N + i >= vocab) loaded.Set(i, FromFloat<T>(-INFINITY));
      }
      StorePack<N>(cache + p * N, loaded);
    }
    max = fmaxf(max, MaxOf(loaded));
  }
  max = BlockMax(max, shared[0]);  // its barrier also makes the whole shard visible
  const float shard_log2 = max == -INFINITY ? 0.f : max * kLog2E;  // nothing but padding: no sum
  float sum = 0;
  for (int p = threadIdx.x; p < packs; p += kBlock) {
    float v[N];
    LoadFloats<N>(cache + p * N, v);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += Exp2(v[i] * kLog2E - shard_log2);
  }
  sum = BlockSum(sum, shared[1]);
  WaitForCluster();
  if (threadIdx.x < shards) StoreAt(&statistics[shard], threadIdx.x, make_float2(max, sum));
  hopper::ClusterSync();
  // All blocks add in the order of the shards, so they get the same bits.
  for (int i = 0; i < shards; ++i) max = fmaxf(max, statistics[i].x);
  sum = 0;
  for (int i = 0; i < shards; ++i) {
    sum += statistics[i].y * Exp2((statistics[i].x - max) * kLog2E);
  }
  const int column = target - begin;
  const bool here = target >= 0 && target < d.vocab && column >= 0 && column < packs * N;
  if (threadIdx.x == 0 && (here || (shard == 0 && (target < 0 || target >= d.vocab)))) {
    d.losses[at_row] = here ? max + logf(sum) - ToFloat(cache[column]) : target < 0 ? 0.f : NAN;
  }
  if (!d.write_gradient) return;
  const int target_pack = here ? column / N : -1;
  const float scale = d.Scale();
  const float offset = target < 0 ? INFINITY : max * kLog2E - log2f(scale / sum);
  for (int p = threadIdx.x; p < packs; p += kBlock) {
    float v[N];
    LoadFloats<N>(cache + p * N, v);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = Exp2(v[i] * kLog2E - offset);
    if (p == target_pack) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] -= p * N + i == column ? scale : 0.f;
    }
    StorePack<N>(row + p * N, FromFloats<T>(v));
  }
#endif
}

// The maximum of x log2(e) over the first `vocab` columns of a row, and the sum of
// 2^(x log2(e) - maximum), for every thread of the block; each element is read once.
template <int kBlock, int N, typename T>
__device__ void RunningSum(const T* row, int vocab, float (*shared)[kWarp], float& row_max,
                           float& row_sum) {
  const int packs = (vocab + N - 1) / N;  // the storage goes on to whole packs
  float max = -INFINITY;                  // of this thread so far
  float sum = 0;
  for (int p = threadIdx.x; p < packs; p += kBlock * kPacksInFlight) {
    Pack<T, N> loaded[kPacksInFlight];
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int at = p + k * kBlock;
      if (at < packs) loaded[k] = LoadPack<N>(row + at * N);
    }
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int at = p + k * kBlock;
      if (at >= packs) continue;
      float v[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = at * N + i < vocab ? loaded[k][i] * kLog2E : -INFINITY;
      }
      float most = max;
#pragma unroll
      for (int i = 0; i < N; ++i) most = fmaxf(most, v[i]);
      if (most == -INFINITY) continue;  // nothing but -infinity so far
      sum *= Exp2(max - most);
      max = most;
#pragma unroll
      for (int i = 0; i < N; ++i) sum += Exp2(v[i] - max);
    }
  }
  row_max = BlockMax(max, shared[0]);
  row_sum = BlockSum(max == -INFINITY ? 0.f : sum * Exp2(max - row_max), shared[1]);
}

template <typename T>
__global__ void __launch_bounds__(kLongRowThreads, 1) LongRowKernel(const Data<T> d) {
  constexpr int N = kPackSize<T>;
  __shared__ float shared[2][kWarp];
  T* const row = d.logits + static_cast<int64_t>(blockIdx.x) * d.columns;
  const int target = d.targets[blockIdx.x];
  const int packs = d.columns / N;
  float row_max, sum;
  RunningSum<kLongRowThreads, N>(row, d.vocab, shared, row_max, sum);
  if (threadIdx.x == 0) {
    d.losses[blockIdx.x] = Loss(target, d.vocab, row, row_max / kLog2E, sum);
  }
  if (!d.write_gradient) return;
  __syncthreads();  // the target's logit has been read
  const float scale = d.Scale();
  const float offset = target < 0 ? INFINITY : row_max - log2f(scale / sum);
  for (int p = threadIdx.x; p < packs; p += kLongRowThreads) {
    float v[N];
    LoadFloats<N>(row + p * N, v);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      v[i] = p * N + i < d.vocab ? Exp2(v[i] * kLog2E - offset) : 0.f;
      if (p * N + i == target) v[i] -= scale;
    }
    StorePack<N>(row + p * N, FromFloats<T>(v));
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads) AnyRowKernel(const Data<T> d) {
  __shared__ float shared[2][kWarp];
  T* const row = d.logits + static_cast<int64_t>(blockIdx.x) * d.columns;
  const int target = d.targets[blockIdx.x];
  float max = -INFINITY;
  for (int i = threadIdx.x; i < d.vocab; i += kThreads) max = fmaxf(max, ToFloat(row[i]));
  max = BlockMax(max, shared[0]);
  const float max_log2 = max * kLog2E;
  float sum = 0;
  for (int i = threadIdx.x; i < d.vocab; i += kThreads) {
    sum += Exp2(ToFloat(row[i]) * kLog2E - max_log2);
  }
  sum = BlockSum(sum, shared[1]);
  if (threadIdx.x == 0) {
    d.losses[blockIdx.x] = Loss(target, d.vocab, row, max, sum);
  }
  if (!d.write_gradient) return;
  __syncthreads();  // the target's logit has been read
  const float scale = d.Scale();
  const float factor = target < 0 ? 0.f : scale / sum;
  for (int i = threadIdx.x; i < d.columns; i += kThreads) {
    float gradient = i < d.vocab ? factor * Exp2(ToFloat(row[i]) * kLog2E - max_log2) : 0.f;
    if (i == target) gradient -= scale;
    row[i] = FromFloat<T>(gradient);
  }
}

// Launches over clusters. False where the code that the device runs has none, or where even eighths
// of a row are too large for two blocks on a multiprocessor; then nothing was launched.
template <typename T>
bool LaunchOverClusters(CudaStream& stream, const Data<T>& d, unsigned rows) {
  const CudaDevice& device = stream.cuda_device();
  const int packs = d.columns / kPackSize<T>;
  const auto bytes = [&](int shards) { return (packs + shards - 1) / shards * 16; };
  const auto fits = [&](int shards, int blocks) {
    return bytes(shards) <= device.shared_bytes_per_block() / blocks - 2048;
  };
  int shards = 2;
  while (shards < kShardsMax && !fits(shards, kBlocksPerProcessor)) shards *= 2;
  auto* const kernel = &ClusterRowKernel<T>;
  if (!IsBuiltForHopper(kernel) || !fits(shards, 2)) return false;
  stream.Check(LaunchClusters(stream, kernel, rows, shards, kThreads, bytes(shards), d, shards,
                              bytes(shards) / 16),
               "CrossEntropy over clusters");
  return true;
}

template <typename T>
void Launch(CudaStream& stream, const CrossEntropyArgs& args) {
  const Data<T> d{args.logits.as<T>(),
                  args.targets.as<int32_t>(),
                  args.losses.f32(),
                  static_cast<int>(args.logits.dim(1)),
                  static_cast<int>(args.vocab),
                  args.scale,
                  args.loss_scale,
                  args.write_gradient};
  const auto rows = static_cast<unsigned>(args.logits.dim(0));
  const int row_bytes = d.columns * static_cast<int>(sizeof(T));
  // Two rows a multiprocessor, so that one loads while the other computes.
  const int limit = stream.cuda_device().shared_bytes_per_block() / 2 - 1024;
  const bool packs = d.columns % kPackSize<T> == 0 && Aligned16(args.logits);
  if (packs && row_bytes > limit) {
    if (LaunchOverClusters(stream, d, rows)) return;
    LongRowKernel<T><<<rows, kLongRowThreads, 0, stream.handle()>>>(d);
  } else if (packs) {
    if (!stream.Check(cudaFuncSetAttribute(CachedRowKernel<T>,
                                           cudaFuncAttributeMaxDynamicSharedMemorySize, row_bytes),
                      "CrossEntropy: shared memory")) {
      return;
    }
    CachedRowKernel<T><<<rows, kThreads, row_bytes, stream.handle()>>>(d);
  } else {
    AnyRowKernel<T><<<rows, kThreads, 0, stream.handle()>>>(d);
  }
  stream.CheckLaunch("CrossEntropy");
}

// ---- a vocabulary that is sharded over ranks ----

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    StatsKernel(const T* logits, const int32_t* targets, int columns, int64_t first, int vocab,
                float* stats) {
  __shared__ float shared[2][kWarp];
  const T* const row = logits + static_cast<int64_t>(blockIdx.x) * columns;
  float max, sum;
  RunningSum<kThreads, N>(row, vocab, shared, max, sum);
  if (threadIdx.x != 0) return;
  const int64_t target = targets[blockIdx.x] - first;
  float* const out = stats + static_cast<int64_t>(blockIdx.x) * 3;
  out[0] = max / kLog2E;
  out[1] = sum;
  out[2] = target >= 0 && target < vocab ? ToFloat(row[target]) : 0.f;
}

template <typename T>
struct MergeData {
  T* logits;
  const int32_t* targets;
  const float* stats;  // [ranks,rows,3]
  float* losses;
  int64_t first;
  int rows, columns, vocab, ranks;
  float scale;
  const float* loss_scale;  // or nullptr
  bool write_gradient;
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) MergeKernel(const MergeData<T> d) {
  T* const row = d.logits + static_cast<int64_t>(blockIdx.x) * d.columns;
  const bool masked = d.targets[blockIdx.x] < 0;
  const float* const stats = d.stats + static_cast<int64_t>(blockIdx.x) * 3;
  const int64_t stride = static_cast<int64_t>(d.rows) * 3;
  // Every thread adds all ranks in their order, so all ranks get the same bits.
  float most = -INFINITY;
  for (int rank = 0; rank < d.ranks; ++rank) most = fmaxf(most, stats[rank * stride]);
  float sum = 0, of_target = 0;
  for (int rank = 0; rank < d.ranks; ++rank) {
    const float* const part = stats + rank * stride;
    sum += part[1] * Exp2((part[0] - most) * kLog2E);
    of_target += part[2];
  }
  if (threadIdx.x == 0) {
    d.losses[blockIdx.x] = masked ? 0.f : logf(sum) + (most - of_target);
  }
  if (!d.write_gradient) return;
  const float scale = d.loss_scale == nullptr ? d.scale : d.scale * *d.loss_scale;
  const float offset = masked ? INFINITY : most * kLog2E - log2f(scale / sum);
  // -1 where another rank has the target. Columns of the padding would be tokens of the next rank.
  const int64_t column = d.targets[blockIdx.x] - d.first;
  const int64_t target = !masked && column < d.vocab ? column : -1;
  const int packs = d.columns / N;
  for (int p = threadIdx.x; p < packs; p += kThreads * kPacksInFlight) {
    Pack<T, N> loaded[kPacksInFlight];
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int at = p + k * kThreads;
      if (at < packs) loaded[k] = LoadPack<N>(row + at * N);
    }
#pragma unroll
    for (int k = 0; k < kPacksInFlight; ++k) {
      const int at = p + k * kThreads;
      if (at >= packs) continue;
      float v[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        v[i] = at * N + i < d.vocab ? Exp2(loaded[k][i] * kLog2E - offset) : 0.f;
        if (at * N + i == target) v[i] -= scale;
      }
      StorePack<N>(row + at * N, FromFloats<T>(v));
    }
  }
}

// Calls launch(N as a constant), with whole packs where every row is aligned.
template <typename T, typename Launch>
void ForPacks(const Tensor& logits, const Launch& launch) {
  constexpr int N = kPackSize<T>;
  if (logits.dim(1) % N == 0 && Aligned16(logits)) {
    launch(std::integral_constant<int, N>());
  } else {
    launch(std::integral_constant<int, 1>());
  }
}

}  // namespace

void CrossEntropy(Stream& stream, const CrossEntropyArgs& args) {
  if (args.logits.dim(0) == 0) return;
  DispatchFloat(args.logits.dtype(),
                [&](auto tag) { Launch<decltype(tag)>(CudaStream::Of(stream), args); });
}

void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args) {
  const auto rows = static_cast<unsigned>(args.logits.dim(0));
  if (rows == 0) return;
  CudaStream& cuda = CudaStream::Of(stream);
  DispatchFloat(args.logits.dtype(), [&](auto tag) {
    using T = decltype(tag);
    ForPacks<T>(args.logits, [&](auto width) {
      StatsKernel<T, width()><<<rows, kThreads, 0, cuda.handle()>>>(
          args.logits.as<const T>(), args.targets.as<const int32_t>(),
          static_cast<int>(args.logits.dim(1)), args.first, static_cast<int>(args.vocab),
          args.stats.f32());
    });
  });
  cuda.CheckLaunch("CrossEntropyStats");
}

void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args) {
  const auto rows = static_cast<unsigned>(args.logits.dim(0));
  if (rows == 0) return;
  CudaStream& cuda = CudaStream::Of(stream);
  DispatchFloat(args.logits.dtype(), [&](auto tag) {
    using T = decltype(tag);
    const MergeData<T> d{args.logits.as<T>(),
                         args.targets.as<const int32_t>(),
                         args.stats.f32(),
                         args.losses.f32(),
                         args.first,
                         static_cast<int>(rows),
                         static_cast<int>(args.logits.dim(1)),
                         static_cast<int>(args.vocab),
                         static_cast<int>(args.stats.dim(0)),
                         args.scale,
                         args.loss_scale,
                         args.write_gradient};
    ForPacks<T>(args.logits, [&](auto width) {
      MergeKernel<T, width()><<<rows, kThreads, 0, cuda.handle()>>>(d);
    });
  });
  cuda.CheckLaunch("CrossEntropyMerge");
}

}  // namespace muster::kernels::cuda
