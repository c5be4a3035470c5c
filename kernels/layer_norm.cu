// Layer norm with the residual addition in front of it.
// Forward: one warp a row, the row held in registers, mean and variance in two passes over them.
// Bytes: 2 reads and 2 writes of [T,C] (1 and 1 without a branch).
// Backward: dx = dx + rstd (g - mean(g) - xhat mean(g xhat)) with g = dy gamma,
// xhat = (x - mean) rstd. One pass: each thread owns a pack of columns and walks over rows, so
// dgamma and dbeta add up in its registers while dx is written; the blocks' results are then added
// in block order (reduce.cu). Bytes: 3 reads and 1 write of [T,C].
#include <algorithm>

#include "kernels/column_sum.cuh"
#include "kernels/ops_cuda.h"
#include "kernels/pack.cuh"

namespace muster::kernels::cuda {
namespace {

constexpr int kForwardWarps = 8;
constexpr int kAnyThreads = 256;
constexpr int kBackwardRows = 2;  // whose sums are reduced together

template <typename T>
struct ForwardData {
  const T* residual;
  const T* branch;  // or nullptr
  T* sum;           // or nullptr
  FloatVector gamma;
  FloatVector beta;
  T* y;
  float* mean;
  float* rstd;
  float epsilon;
  int64_t rows;
  int columns;
};

// Rows of at most 32 * kItems packs.
template <typename T, int kItems>
__global__ void __launch_bounds__(kForwardWarps* kWarp)
    LayerNormForwardKernel(const ForwardData<T> d) {
  constexpr int N = kPackSize<T>;
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kForwardWarps + threadIdx.x / kWarp;
  if (row >= d.rows) return;
  const int64_t start = row * d.columns;
  // Every load is issued before the first store, which the compiler must assume to alias them.
  Pack<T, N> x[kItems], branch[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int column = (k * kWarp + lane) * N;
    if (column < d.columns) x[k] = LoadPack<N>(d.residual + start + column);
  }
  if (d.branch != nullptr) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int column = (k * kWarp + lane) * N;
      if (column < d.columns) branch[k] = LoadPack<N>(d.branch + start + column);
    }
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int column = (k * kWarp + lane) * N;
    if (column >= d.columns) continue;
    float v[N];
    ToFloats(x[k], v);
    if (d.branch != nullptr) {
#pragma unroll
      for (int i = 0; i < N; ++i) v[i] += branch[k][i];
      // The norm is taken of what backward will read: the rounded sum.
      x[k] = FromFloats<T>(v);
      ToFloats(x[k], v);
    }
    if (d.sum != nullptr) StorePack<N>(d.sum + start + column, x[k]);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += v[i];
  }
  const float mean = WarpSum(sum) / d.columns;
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if ((k * kWarp + lane) * N >= d.columns) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float centred = x[k][i] - mean;
      squares += centred * centred;
    }
  }
  const float rstd = rsqrtf(WarpSum(squares) / d.columns + d.epsilon);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int column = (k * kWarp + lane) * N;
    if (column >= d.columns) continue;
    float v[N], gamma[N], beta[N];
    d.gamma.template Load<N>(column, gamma);
    d.beta.template Load<N>(column, beta);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = (x[k][i] - mean) * rstd * gamma[i] + beta[i];
    StorePack<N>(d.y + start + column, FromFloats<T>(v));
  }
  if (lane == 0) {
    d.mean[row] = mean;
    d.rstd[row] = rstd;
  }
}

// Any width and alignment; the row is read again from cache.
template <typename T>
__global__ void __launch_bounds__(kAnyThreads) LayerNormForwardAnyKernel(const ForwardData<T> d) {
  __shared__ float shared[2][kWarp];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * d.columns;
  const auto load = [&](int column) {
    const float x = ToFloat(d.residual[start + column]);
    if (d.branch == nullptr) return x;
    return ToFloat(FromFloat<T>(x + ToFloat(d.branch[start + column])));
  };
  float sum = 0;
  for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) sum += load(c);
  const float mean = BlockSum(sum, shared[0]) / d.columns;
  float squares = 0;
  for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
    const float centred = load(c) - mean;
    squares += centred * centred;
  }
  const float rstd = rsqrtf(BlockSum(squares, shared[1]) / d.columns + d.epsilon);
  for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
    const float x = load(c);  // before `sum`, which may alias the residual, is written
    if (d.sum != nullptr) d.sum[start + c] = FromFloat<T>(x);
    d.y[start + c] = FromFloat<T>((x - mean) * rstd * d.gamma[c] + d.beta[c]);
  }
  if (threadIdx.x == 0) {
    d.mean[blockIdx.x] = mean;
    d.rstd[blockIdx.x] = rstd;
  }
}

template <typename T>
struct BackwardData {
  const T* dy;
  const T* x;
  FloatVector gamma;
  const float* mean;
  const float* rstd;
  T* dx;
  float* partial;  // [blocks][2][columns]: dgamma, dbeta
  int64_t rows;
  int columns;
};

// One thread a pack of columns; the block walks over rows, kBackwardRows at a time.
// kThreads bounds the block, kBlocks the registers: that many blocks fit a multiprocessor.
template <typename T, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    LayerNormBackwardKernel(const BackwardData<T> d) {
  constexpr int N = kPackSize<T>;
  constexpr int R = kBackwardRows;
  // Two sets, used in turn: one barrier a step is enough.
  __shared__ float2 shared[2][kWarp][R];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const int column = threadIdx.x * N;
  const bool active = column < d.columns;
  const float inverse_columns = 1.f / d.columns;
  float gamma[N] = {};
  float dgamma[N] = {};
  float dbeta[N] = {};
  if (active) d.gamma.template Load<N>(column, gamma);
  int set = 0;
  for (int64_t row0 = static_cast<int64_t>(blockIdx.x) * R; row0 < d.rows;
       row0 += static_cast<int64_t>(gridDim.x) * R, set ^= 1) {
    Pack<T, N> dy[R] = {}, x[R] = {}, dx[R] = {};
    float rstd[R] = {}, shift[R] = {};  // xhat = x rstd + shift
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row0 + r >= d.rows) continue;
      rstd[r] = d.rstd[row0 + r];
      shift[r] = -d.mean[row0 + r] * rstd[r];
      if (!active) continue;
      const int64_t at = (row0 + r) * d.columns + column;
      dy[r] = LoadPack<N>(d.dy + at);
      x[r] = LoadPack<N>(d.x + at);
      dx[r] = LoadPack<N>(d.dx + at);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float2 sums = {0, 0};  // of g and of g xhat
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gradient = dy[r][i];
        const float xhat = x[r][i] * rstd[r] + shift[r];
        dgamma[i] += gradient * xhat;
        dbeta[i] += gradient;
        sums.x += gradient * gamma[i];
        sums.y += gradient * gamma[i] * xhat;
      }
      sums.x = WarpSum(sums.x);
      sums.y = WarpSum(sums.y);
      if (lane == 0) shared[set][warp][r] = sums;
    }
    __syncthreads();
    float2 totals[R] = {};
    for (int w = 0; w < warps; ++w) {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        totals[r].x += shared[set][w][r].x;
        totals[r].y += shared[set][w][r].y;
      }
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!active || row0 + r >= d.rows) continue;
      const float mean_g = totals[r].x * inverse_columns;
      const float mean_gx = totals[r].y * inverse_columns;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = x[r][i] * rstd[r] + shift[r];
        const float g = dy[r][i] * gamma[i];
        out[i] = dx[r][i] + rstd[r] * (g - mean_g - xhat * mean_gx);
      }
      StorePack<N>(d.dx + (row0 + r) * d.columns + column, FromFloats<T>(out));
    }
  }
  if (!active) return;
  float* const partial = d.partial + static_cast<int64_t>(blockIdx.x) * 2 * d.columns + column;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    partial[i] = dgamma[i];
    partial[d.columns + i] = dbeta[i];
  }
}

// Any width and alignment; dgamma and dbeta of the block add up in `partial`.
template <typename T>
__global__ void __launch_bounds__(kAnyThreads) LayerNormBackwardAnyKernel(const BackwardData<T> d) {
  __shared__ float shared[2][kWarp];
  float* const partial = d.partial + static_cast<int64_t>(blockIdx.x) * 2 * d.columns;
  for (int c = threadIdx.x; c < 2 * d.columns; c += kAnyThreads) partial[c] = 0;
  __syncthreads();
  for (int64_t row = blockIdx.x; row < d.rows; row += gridDim.x) {
    const int64_t start = row * d.columns;
    const float mean = d.mean[row];
    const float rstd = d.rstd[row];
    float sum_g = 0;
    float sum_gx = 0;
    for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
      const float gradient = ToFloat(d.dy[start + c]);
      const float xhat = (ToFloat(d.x[start + c]) - mean) * rstd;
      partial[c] += gradient * xhat;
      partial[d.columns + c] += gradient;
      sum_g += gradient * d.gamma[c];
      sum_gx += gradient * d.gamma[c] * xhat;
    }
    const float mean_g = BlockSum(sum_g, shared[0]) / d.columns;
    const float mean_gx = BlockSum(sum_gx, shared[1]) / d.columns;
    for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
      const float xhat = (ToFloat(d.x[start + c]) - mean) * rstd;
      const float g = ToFloat(d.dy[start + c]) * d.gamma[c];
      d.dx[start + c] =
          FromFloat<T>(ToFloat(d.dx[start + c]) + rstd * (g - mean_g - xhat * mean_gx));
    }
    __syncthreads();  // `shared` is written again in the next row
  }
}

template <typename T>
void Forward(CudaStream& stream, const LayerNormForwardArgs& args) {
  const ForwardData<T> d{args.residual.as<T>(),
                         args.branch.empty() ? nullptr : args.branch.as<T>(),
                         args.sum.empty() ? nullptr : args.sum.as<T>(),
                         AsFloatVector(args.gamma),
                         AsFloatVector(args.beta),
                         args.y.as<T>(),
                         args.mean.f32(),
                         args.rstd.f32(),
                         args.epsilon,
                         args.residual.dim(0),
                         static_cast<int>(args.residual.dim(1))};
  const bool packs = Aligned16(args.residual) && Aligned16(args.branch) && Aligned16(args.sum) &&
                     Aligned16(args.y) && Aligned16(args.gamma) && Aligned16(args.beta) &&
                     d.columns % kPackSize<T> == 0;
  const int items = packs ? static_cast<int>(CeilDiv(d.columns, kPackSize<T> * kWarp)) : 0;
  const auto blocks = static_cast<unsigned>(CeilDiv(d.rows, kForwardWarps));
  constexpr int kThreads = kForwardWarps * kWarp;
  if (items == 0 || items > 16) {
    LayerNormForwardAnyKernel<T>
        <<<static_cast<unsigned>(d.rows), kAnyThreads, 0, stream.handle()>>>(d);
  } else if (items <= 1) {
    LayerNormForwardKernel<T, 1><<<blocks, kThreads, 0, stream.handle()>>>(d);
  } else if (items <= 3) {
    LayerNormForwardKernel<T, 3><<<blocks, kThreads, 0, stream.handle()>>>(d);
  } else if (items <= 7) {
    LayerNormForwardKernel<T, 7><<<blocks, kThreads, 0, stream.handle()>>>(d);
  } else {
    LayerNormForwardKernel<T, 16><<<blocks, kThreads, 0, stream.handle()>>>(d);
  }
  stream.CheckLaunch("LayerNormForward");
}

template <typename T>
void Backward(CudaStream& stream, const LayerNormBackwardArgs& args) {
  BackwardData<T> d{args.dy.as<T>(),     args.x.as<T>(),  AsFloatVector(args.gamma),
                    args.mean.f32(),     args.rstd.f32(), args.dx.as<T>(),
                    /*partial=*/nullptr, args.dy.dim(0),  static_cast<int>(args.dy.dim(1))};
  const int64_t threads = CeilDiv(CeilDiv(d.columns, kPackSize<T>), kWarp) * kWarp;
  const bool packs = Aligned16(args.dy) && Aligned16(args.x) && Aligned16(args.dx) &&
                     Aligned16(args.gamma) && d.columns % kPackSize<T> == 0 && threads <= 1024;
  const auto launch = [&](auto kernel, int64_t block) {
    // As many blocks as run at once, so that all get the same share of the rows.
    int resident = 0;
    if (!stream.Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel,
                                                                    static_cast<int>(block), 0),
                      "LayerNormBackward")) {
      return;
    }
    const int64_t blocks = std::min<int64_t>(
        CeilDiv(d.rows, kBackwardRows), int64_t{resident} * stream.cuda_device().multiprocessors());
    d.partial = static_cast<float*>(stream.Scratch(blocks * 2 * d.columns * sizeof(float)));
    if (d.partial == nullptr) return;
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(block), 0, stream.handle()>>>(d);
    stream.CheckLaunch("LayerNormBackward");
    AddPartials(stream, d.partial, blocks, d.columns, args.dgamma.f32(), args.dbeta.f32());
  };
  if (!packs) {
    launch(LayerNormBackwardAnyKernel<T>, kAnyThreads);
  } else if (threads <= 128) {
    launch(LayerNormBackwardKernel<T, 128, 7>, threads);
  } else if (threads <= 256) {
    launch(LayerNormBackwardKernel<T, 256, 3>, threads);
  } else if (threads <= 512) {
    launch(LayerNormBackwardKernel<T, 512, 1>, threads);
  } else {
    launch(LayerNormBackwardKernel<T, 1024, 1>, threads);
  }
}

}  // namespace

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  if (args.residual.dim(0) == 0) return;
  DispatchFloat(args.residual.dtype(),
                [&](auto tag) { Forward<decltype(tag)>(CudaStream::Of(stream), args); });
}

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  if (args.dy.dim(0) == 0) return;
  DispatchFloat(args.dy.dtype(),
                [&](auto tag) { Backward<decltype(tag)>(CudaStream::Of(stream), args); });
}

}  // namespace muster::kernels::cuda
