// A step of decoding: one query per head over L keys, in fp32 on the CUDA cores, since there is one
// multiply-add per element of the cache. Bytes: keys and values are read once per query head from
// the L2 cache, which they fit where the heads of a group run side by side.
//
// A block takes kAttentionDecodeKeys keys of one head. Each of its warps walks over every kWarps-th
// of them with an online softmax (FlashAttention-2, arXiv 2307.08691), kUnroll keys at a time so
// that their loads overlap; lanes own columns. The warps' results are combined in shared memory,
// and those of the blocks by a second kernel. How the keys are shared out depends on L alone, and
// every sum has a fixed order, so the bits repeat.
#include <cmath>
#include <cstdint>

#include "base/check.h"
#include "kernels/attention/attention_decode.h"
#include "kernels/attention/attention_problem.cuh"
#include "kernels/attention/head_width.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kUnroll = 4;
constexpr int kWidthMax = static_cast<int>(kCudaHeadWidthMax);

template <typename T>
struct Step {
  HeadsView<T> q, k, v, out;
  float* partial;  // [B,H,splits,D+2]: the maximum, the sum, and the columns not divided by it
  int64_t keys;
  int heads, group, splits, width;
  float scale;
};

// Grid: (splits, heads, batch). A lane owns kPacks packs of N columns, 32 N columns apart.
template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(kThreads) DecodeKernel(const Step<T> d) {
  __shared__ float most_of[kWarps], sum_of[kWarps], columns_of[kWarps][kWidthMax];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int head = blockIdx.y;
  const int b = blockIdx.z;
  const T* const k = d.k.Head(b, head / d.group);
  const T* const v = d.v.Head(b, head / d.group);
  const T* const query = d.q.Head(b, head);
  float q[kPacks][N], out[kPacks][N];
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * kWarp + lane) * N;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      q[i][j] = column + j < d.width ? ToFloat(query[column + j]) * d.scale : 0.f;
      out[i][j] = 0;
    }
  }
  const int64_t begin = blockIdx.x * kAttentionDecodeKeys;
  const int64_t end = begin + kAttentionDecodeKeys < d.keys ? begin + kAttentionDecodeKeys : d.keys;
  float most = -INFINITY, sum = 0;
  for (int64_t first = begin + warp; first < end; first += kWarps * kUnroll) {
    float score[kUnroll];
    float next = most;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t key = first + u * kWarps;
      float dot = 0;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int column = (i * kWarp + lane) * N;
        if (key < end && column < d.width) {
          float x[N];
          LoadFloats<N>(k + key * d.k.row_stride + column, x);
#pragma unroll
          for (int j = 0; j < N; ++j) dot += q[i][j] * x[j];
        }
      }
      dot = WarpSum(dot);
      score[u] = key < end ? dot : -INFINITY;
      next = fmaxf(next, score[u]);
    }
    // The first of these keys exists, so `next` is finite.
    const float shrink = __expf(most - next);
    most = next;
    sum *= shrink;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) out[i][j] *= shrink;
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t key = first + u * kWarps;
      const float weight = __expf(score[u] - most);
      sum += weight;
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        const int column = (i * kWarp + lane) * N;
        if (key < end && column < d.width) {
          float x[N];
          LoadFloats<N>(v + key * d.v.row_stride + column, x);
#pragma unroll
          for (int j = 0; j < N; ++j) out[i][j] += weight * x[j];
        }
      }
    }
  }
  if (lane == 0) {
    most_of[warp] = most;
    sum_of[warp] = sum;
  }
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    const int column = (i * kWarp + lane) * N;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      if (column + j < d.width) columns_of[warp][column + j] = out[i][j];
    }
  }
  __syncthreads();
  // The first warp has a key, so the maximum is finite; a warp without one counts nothing.
  float block_most = most_of[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) block_most = fmaxf(block_most, most_of[w]);
  float factor[kWarps], block_sum = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    factor[w] = __expf(most_of[w] - block_most);
    block_sum += factor[w] * sum_of[w];
  }
  float* const partial =
      d.partial +
      ((static_cast<int64_t>(b) * d.heads + head) * d.splits + blockIdx.x) * (d.width + 2);
  if (d.splits > 1 && threadIdx.x == 0) {
    partial[0] = block_most;
    partial[1] = block_sum;
  }
  for (int column = threadIdx.x; column < d.width; column += kThreads) {
    float x = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) x += factor[w] * columns_of[w][column];
    if (d.splits > 1) {
      partial[2 + column] = x;
    } else {
      d.out.Head(b, head)[column] = FromFloat<T>(x / block_sum);
    }
  }
}

// Grid: (heads, batch).
template <typename T>
__global__ void __launch_bounds__(kThreads) CombineKernel(const Step<T> d) {
  __shared__ float shared[kWarp], shared_sum[kWarp];
  const int head = blockIdx.x;
  const int b = blockIdx.y;
  const int64_t stride = d.width + 2;
  const float* const partial =
      d.partial + (static_cast<int64_t>(b) * d.heads + head) * d.splits * stride;
  float most = -INFINITY;
  for (int i = threadIdx.x; i < d.splits; i += kThreads) most = fmaxf(most, partial[i * stride]);
  most = BlockMax(most, shared);
  float sum = 0;
  for (int i = threadIdx.x; i < d.splits; i += kThreads) {
    sum += __expf(partial[i * stride] - most) * partial[i * stride + 1];
  }
  sum = BlockSum(sum, shared_sum);
  for (int column = threadIdx.x; column < d.width; column += kThreads) {
    float x = 0;
    for (int i = 0; i < d.splits; ++i) {
      x += __expf(partial[i * stride] - most) * partial[i * stride + 2 + column];
    }
    d.out.Head(b, head)[column] = FromFloat<T>(x / sum);
  }
}

template <typename T, int N, int kPacks>
void LaunchOf(CudaStream& stream, const Step<T>& d, int batch) {
  const dim3 grid(static_cast<unsigned>(d.splits), static_cast<unsigned>(d.heads),
                  static_cast<unsigned>(batch));
  DecodeKernel<T, N, kPacks><<<grid, kThreads, 0, stream.handle()>>>(d);
}

// Packs of N columns.
template <typename T, int N>
void LaunchPacks(CudaStream& stream, const Step<T>& d, int batch) {
  const int packs = static_cast<int>(CeilDiv(d.width, kWarp * N));
  if (packs <= 1) {
    LaunchOf<T, N, 1>(stream, d, batch);
  } else if (packs <= 2) {
    LaunchOf<T, N, 2>(stream, d, batch);
  } else if (packs <= 4) {
    LaunchOf<T, N, 4>(stream, d, batch);
  } else {
    LaunchOf<T, N, kWidthMax / kWarp / N>(stream, d, batch);
  }
}

// Whether every row of every head starts at a multiple of two elements.
bool Pairs(const Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.data()) % (2 * SizeOf(x.dtype())) == 0 &&
         x.stride(0) % 2 == 0 && x.stride(1) % 2 == 0 && x.stride(2) % 2 == 0;
}

template <typename T>
void Launch(CudaStream& stream, const AttentionDecodeArgs& args) {
  Step<T> d{};
  d.q = ViewHeads<T>(args.q);
  d.k = ViewHeads<T>(args.k);
  d.v = ViewHeads<T>(args.v);
  d.out = ViewHeads<T>(args.out);
  d.partial = args.partial.f32();
  d.keys = args.k.dim(1);
  d.heads = static_cast<int>(args.q.dim(2));
  d.group = static_cast<int>(args.q.dim(2) / args.k.dim(2));
  d.splits = static_cast<int>(CeilDiv(d.keys, kAttentionDecodeKeys));
  d.width = static_cast<int>(args.q.dim(3));
  d.scale = args.scale != 0 ? args.scale : 1.f / std::sqrt(static_cast<float>(d.width));
  const int batch = static_cast<int>(args.q.dim(0));
  if (d.width % 2 == 0 && Pairs(args.k) && Pairs(args.v)) {
    LaunchPacks<T, 2>(stream, d, batch);
  } else {
    LaunchPacks<T, 1>(stream, d, batch);
  }
  stream.CheckLaunch("AttentionDecode");
  if (d.splits == 1) return;
  const dim3 grid(static_cast<unsigned>(d.heads), static_cast<unsigned>(batch));
  CombineKernel<T><<<grid, kThreads, 0, stream.handle()>>>(d);
  stream.CheckLaunch("AttentionDecode: combine");
}

}  // namespace

void AttentionDecode(Stream& stream, const AttentionDecodeArgs& args) {
  if (args.q.elements() == 0) return;
  CHECK_LE(args.q.dim(3), kCudaHeadWidthMax);
  DispatchFloat(args.q.dtype(),
                [&](auto tag) { Launch<decltype(tag)>(CudaStream::Of(stream), args); });
}

}  // namespace muster::kernels::cuda
