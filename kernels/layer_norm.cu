// Layer norm and RMS norm with the residual addition in front of them; an RMS norm is a layer norm
// with the mean taken as 0 and without beta.
// Forward: one warp a row, or a block a long one, the row held in registers, mean and variance in
// two passes over them.
// Bytes: 2 reads and 2 writes of [T,C] (1 and 1 without a branch).
// Backward: dx = dx + rstd (g - mean(g) - xhat mean(g xhat)) with g = dy gamma,
// xhat = (x - mean) rstd; no mean(g) in an RMS norm. One pass: each thread owns a pack of columns
// and walks over rows, so dgamma and dbeta add up in its registers while dx is written; the blocks'
// results are then added in block order (reduce.cu). The rows ahead are on their way into shared
// memory meanwhile: each thread copies what it will read itself, so that no barrier is needed for
// it. Bytes: 3 reads and 1 write of [T,C].
#include <algorithm>

#include "kernels/column_sum.cuh"
#include "kernels/ops_cuda.h"
#include "kernels/pack.cuh"

namespace muster::kernels::cuda {
namespace {

constexpr int kForwardThreads = 256;
constexpr int kAnyThreads = 256;

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

// kLanes threads a row, a warp or the whole block: rows of at most kLanes * kItems packs.
template <typename T, int kLanes, int kItems, bool kRms>
__global__ void __launch_bounds__(kForwardThreads) NormForwardKernel(const ForwardData<T> d) {
  static_assert(kLanes == kWarp || kLanes == kForwardThreads);
  constexpr int N = kPackSize<T>;
  constexpr int kRows = kForwardThreads / kLanes;
  __shared__ float shared[2][kWarp];
  const auto sum_of_lanes = [&](float x, int which) {
    return kLanes == kWarp ? WarpSum(x) : BlockSum(x, shared[which]);
  };
  const int lane = threadIdx.x % kLanes;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRows + threadIdx.x / kLanes;
  if (row >= d.rows) return;
  const int64_t start = row * d.columns;
  // Every load is issued before the first store, which the compiler must assume to alias them.
  Pack<T, N> x[kItems], branch[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int column = (k * kLanes + lane) * N;
    if (column < d.columns) x[k] = LoadPack<N>(d.residual + start + column);
  }
  if (d.branch != nullptr) {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const int column = (k * kLanes + lane) * N;
      if (column < d.columns) branch[k] = LoadPack<N>(d.branch + start + column);
    }
  }
  float sum = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int column = (k * kLanes + lane) * N;
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
  const float mean = kRms ? 0.f : sum_of_lanes(sum, 0) / d.columns;
  float squares = 0;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    if ((k * kLanes + lane) * N >= d.columns) continue;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float centred = x[k][i] - mean;
      squares += centred * centred;
    }
  }
  const float rstd = rsqrtf(sum_of_lanes(squares, 1) / d.columns + d.epsilon);
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const int column = (k * kLanes + lane) * N;
    if (column >= d.columns) continue;
    float v[N], gamma[N], beta[N] = {};
    d.gamma.template Load<N>(column, gamma);
    if constexpr (!kRms) d.beta.template Load<N>(column, beta);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = (x[k][i] - mean) * rstd * gamma[i] + beta[i];
    StorePack<N>(d.y + start + column, FromFloats<T>(v));
  }
  if (lane == 0) {
    if constexpr (!kRms) d.mean[row] = mean;
    d.rstd[row] = rstd;
  }
}

// Any width and alignment; the row is read again from cache.
template <typename T, bool kRms>
__global__ void __launch_bounds__(kAnyThreads) NormForwardAnyKernel(const ForwardData<T> d) {
  __shared__ float shared[2][kWarp];
  const int64_t start = static_cast<int64_t>(blockIdx.x) * d.columns;
  const auto load = [&](int column) {
    const float x = ToFloat(d.residual[start + column]);
    if (d.branch == nullptr) return x;
    return ToFloat(FromFloat<T>(x + ToFloat(d.branch[start + column])));
  };
  float sum = 0;
  for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) sum += load(c);
  const float mean = kRms ? 0.f : BlockSum(sum, shared[0]) / d.columns;
  float squares = 0;
  for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
    const float centred = load(c) - mean;
    squares += centred * centred;
  }
  const float rstd = rsqrtf(BlockSum(squares, shared[1]) / d.columns + d.epsilon);
  for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
    const float x = load(c);  // before `sum`, which may alias the residual, is written
    if (d.sum != nullptr) d.sum[start + c] = FromFloat<T>(x);
    d.y[start + c] = FromFloat<T>((x - mean) * rstd * d.gamma[c] + (kRms ? 0.f : d.beta[c]));
  }
  if (threadIdx.x == 0) {
    if constexpr (!kRms) d.mean[blockIdx.x] = mean;
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

// One thread a pack of columns; the block walks over rows, R at a time (their sums are reduced
// together), with the next S - 1 times R rows on their way.
// kThreads bounds the block, kBlocks the registers: that many blocks fit a multiprocessor.
// kAgain: dy and x are read again from shared memory behind the barrier instead of kept in
// registers.
template <typename T, int kThreads, int kBlocks, int R, int S, bool kRms>
__global__ void __launch_bounds__(kThreads, kBlocks) NormBackwardKernel(const BackwardData<T> d) {
  constexpr int N = kPackSize<T>;
  extern __shared__ uint4 ring[];  // [S][R][dy, x, dx][threads]
  // Two sets, used in turn: one barrier a step is enough.
  __shared__ alignas(16) float2 shared[2][kWarp][R];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int warps = blockDim.x / kWarp;
  const int column = threadIdx.x * N;
  const bool active = column < d.columns;
  const float inverse_columns = 1.f / d.columns;
  const int64_t step = static_cast<int64_t>(gridDim.x) * R;
  float gamma[N] = {};
  float dgamma[N] = {};
  float dbeta[kRms ? 1 : N] = {};
  if (active) d.gamma.template Load<N>(column, gamma);
  const auto slot = [&](int stage, int r, int which) {
    return ring + ((stage * R + r) * 3 + which) * blockDim.x + threadIdx.x;
  };
  const auto fetch = [&](int64_t row0, int stage) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (!active || row0 + r >= d.rows) continue;
      const int64_t at = (row0 + r) * d.columns + column;
      CopyAsync16(slot(stage, r, 0), d.dy + at);
      CopyAsync16(slot(stage, r, 1), d.x + at);
      CopyAsync16(slot(stage, r, 2), d.dx + at);
    }
    CommitCopies();  // an empty group too: they are counted
  };
  float next_rstd[R] = {}, next_shift[R] = {};  // xhat = x rstd + shift
  const auto fetch_statistics = [&](int64_t row0) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (row0 + r >= d.rows) continue;
      next_rstd[r] = d.rstd[row0 + r];
      if constexpr (!kRms) next_shift[r] = d.mean[row0 + r];
    }
  };
  const int64_t first = static_cast<int64_t>(blockIdx.x) * R;
  fetch_statistics(first);
#pragma unroll
  for (int s = 0; s < S - 1; ++s) fetch(first + s * step, s);
  int set = 0;
  int stage = 0;
  for (int64_t row0 = first; row0 < d.rows; row0 += step, set ^= 1) {
    // The stage that was read in the last step.
    fetch(row0 + (S - 1) * step, stage == 0 ? S - 1 : stage - 1);
    float rstd[R], shift[R];
#pragma unroll
    for (int r = 0; r < R; ++r) {
      rstd[r] = next_rstd[r];
      shift[r] = kRms ? 0.f : -next_shift[r] * next_rstd[r];
    }
    fetch_statistics(row0 + step);
    WaitCopies<S - 1>();
    const auto read = [&](int r, int which) {
      return *reinterpret_cast<const Pack<T, N>*>(slot(stage, r, which));
    };
    Pack<T, N> dy[R] = {}, x[R] = {};
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (active && row0 + r < d.rows) {
        dy[r] = read(r, 0);
        x[r] = read(r, 1);
      }
      float2 sums = {0, 0};  // of g and of g xhat
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float gradient = dy[r][i];
        const float xhat = x[r][i] * rstd[r] + shift[r];
        dgamma[i] += gradient * xhat;
        if constexpr (!kRms) {
          dbeta[i] += gradient;
          sums.x += gradient * gamma[i];
        }
        sums.y += gradient * gamma[i] * xhat;
      }
      if constexpr (!kRms) sums.x = WarpSum(sums.x);
      sums.y = WarpSum(sums.y);
      if (lane == 0) shared[set][warp][r] = sums;
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float2 totals = {0, 0};
      for (int w = 0; w < warps; ++w) {
        totals.x += shared[set][w][r].x;
        totals.y += shared[set][w][r].y;
      }
      if (!active || row0 + r >= d.rows) continue;
      const Pack<T, N> dx = read(r, 2);
      const float mean_g = totals.x * inverse_columns;
      const float mean_gx = totals.y * inverse_columns;
      float out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float xhat = x[r][i] * rstd[r] + shift[r];
        const float g = dy[r][i] * gamma[i];
        out[i] = dx[i] + rstd[r] * (g - mean_g - xhat * mean_gx);
      }
      StorePack<N>(d.dx + (row0 + r) * d.columns + column, FromFloats<T>(out));
    }
    stage = stage + 1 == S ? 0 : stage + 1;
  }
  if (!active) return;
  float* const partial = d.partial + blockIdx.x * (kRms ? int64_t{1} : 2) * d.columns + column;
  StorePack<N>(partial, FromFloats<float>(dgamma));
  if constexpr (!kRms) StorePack<N>(partial + d.columns, FromFloats<float>(dbeta));
}

// Any width and alignment; dgamma and dbeta of the block add up in `partial`.
template <typename T, bool kRms>
__global__ void __launch_bounds__(kAnyThreads) NormBackwardAnyKernel(const BackwardData<T> d) {
  __shared__ float shared[2][kWarp];
  constexpr int64_t kSums = kRms ? 1 : 2;
  float* const partial = d.partial + blockIdx.x * kSums * d.columns;
  for (int c = threadIdx.x; c < kSums * d.columns; c += kAnyThreads) partial[c] = 0;
  __syncthreads();
  for (int64_t row = blockIdx.x; row < d.rows; row += gridDim.x) {
    const int64_t start = row * d.columns;
    const float mean = kRms ? 0.f : d.mean[row];
    const float rstd = d.rstd[row];
    float sum_g = 0;
    float sum_gx = 0;
    for (int c = threadIdx.x; c < d.columns; c += kAnyThreads) {
      const float gradient = ToFloat(d.dy[start + c]);
      const float xhat = (ToFloat(d.x[start + c]) - mean) * rstd;
      partial[c] += gradient * xhat;
      if constexpr (!kRms) partial[d.columns + c] += gradient;
      sum_g += gradient * d.gamma[c];
      sum_gx += gradient * d.gamma[c] * xhat;
    }
    const float mean_g = kRms ? 0.f : BlockSum(sum_g, shared[0]) / d.columns;
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

template <typename T, bool kRms>
void LaunchForward(CudaStream& stream, const char* op, const ForwardData<T>& d, bool packs) {
  const auto items = [&](int lanes) {
    return packs ? static_cast<int>(CeilDiv(d.columns, kPackSize<T> * lanes)) : 0;
  };
  const int of_warp = items(kWarp), of_block = items(kForwardThreads);
  const auto launch = [&](auto kernel, int lanes) {
    const auto blocks = static_cast<unsigned>(CeilDiv(d.rows, kForwardThreads / lanes));
    kernel<<<blocks, kForwardThreads, 0, stream.handle()>>>(d);
  };
  if (of_block == 0 || of_block > 8) {
    NormForwardAnyKernel<T, kRms>
        <<<static_cast<unsigned>(d.rows), kAnyThreads, 0, stream.handle()>>>(d);
  } else if (of_block > 4) {
    launch(NormForwardKernel<T, kForwardThreads, 8, kRms>, kForwardThreads);
  } else if (of_block > 3) {
    launch(NormForwardKernel<T, kForwardThreads, 4, kRms>, kForwardThreads);
  } else if (of_block > 2) {
    launch(NormForwardKernel<T, kForwardThreads, 3, kRms>, kForwardThreads);
  } else if (of_warp > 12) {
    launch(NormForwardKernel<T, kForwardThreads, 2, kRms>, kForwardThreads);
  } else if (of_warp <= 1) {
    launch(NormForwardKernel<T, kWarp, 1, kRms>, kWarp);
  } else if (of_warp <= 3) {
    launch(NormForwardKernel<T, kWarp, 3, kRms>, kWarp);
  } else if (of_warp <= 4) {
    launch(NormForwardKernel<T, kWarp, 4, kRms>, kWarp);
  } else if (of_warp <= 7) {
    launch(NormForwardKernel<T, kWarp, 7, kRms>, kWarp);
  } else if (of_warp <= 8) {
    launch(NormForwardKernel<T, kWarp, 8, kRms>, kWarp);
  } else {
    launch(NormForwardKernel<T, kWarp, 12, kRms>, kWarp);
  }
  stream.CheckLaunch(op);
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
  LaunchForward<T, false>(stream, "LayerNormForward", d,
                          Aligned16(args.residual) && Aligned16(args.branch) &&
                              Aligned16(args.sum) && Aligned16(args.y) && Aligned16(args.gamma) &&
                              Aligned16(args.beta) && d.columns % kPackSize<T> == 0);
}

template <typename T>
void Forward(CudaStream& stream, const RmsNormForwardArgs& args) {
  const ForwardData<T> d{args.residual.as<T>(),
                         args.branch.empty() ? nullptr : args.branch.as<T>(),
                         args.sum.empty() ? nullptr : args.sum.as<T>(),
                         AsFloatVector(args.gamma),
                         FloatVector{},
                         args.y.as<T>(),
                         nullptr,
                         args.rstd.f32(),
                         args.epsilon,
                         args.residual.dim(0),
                         static_cast<int>(args.residual.dim(1))};
  LaunchForward<T, true>(stream, "RmsNormForward", d,
                         Aligned16(args.residual) && Aligned16(args.branch) &&
                             Aligned16(args.sum) && Aligned16(args.y) && Aligned16(args.gamma) &&
                             d.columns % kPackSize<T> == 0);
}

// `dbeta` is nullptr for an RMS norm.
template <typename T, bool kRms>
void LaunchBackward(CudaStream& stream, const char* op, BackwardData<T> d, bool accumulate,
                    float* dgamma, float* dbeta) {
  const int64_t threads = CeilDiv(CeilDiv(d.columns, kPackSize<T>), kWarp) * kWarp;
  const bool packs = Aligned16(d.dy) && Aligned16(d.x) && Aligned16(d.dx) &&
                     Aligned16(d.gamma.data) && d.columns % kPackSize<T> == 0 && threads <= 1024;
  const auto launch = [&](auto kernel, int64_t block, int64_t rows, int64_t slots) {
    const auto shared = static_cast<int>(slots * block * static_cast<int64_t>(sizeof(uint4)));
    // As many blocks as run at once, so that all get the same share of the rows.
    int resident = 0;
    if (!stream.Check(
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared),
            op) ||
        !stream.Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
                          &resident, kernel, static_cast<int>(block), shared),
                      op)) {
      return;
    }
    const int64_t blocks =
        std::min<int64_t>(CeilDiv(d.rows, rows),
                          int64_t{std::max(resident, 1)} * stream.cuda_device().multiprocessors());
    d.partial = static_cast<float*>(
        stream.Scratch(blocks * (kRms ? 1 : 2) * d.columns * static_cast<int64_t>(sizeof(float))));
    if (d.partial == nullptr) return;
    kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(block), shared,
             stream.handle()>>>(d);
    stream.CheckLaunch(op);
    AddPartials(stream, d.partial, blocks, d.columns, accumulate, dgamma, dbeta);
  };
  // Rows a step, stages and registers as measured on an H200.
  if (!packs) {
    launch(NormBackwardAnyKernel<T, kRms>, kAnyThreads, 1, 0);
  } else if (threads <= 128) {
    launch(NormBackwardKernel<T, 128, 5, 2, 3, kRms>, threads, 2, 2 * 3 * 3);
  } else if (threads <= 160) {
    launch(NormBackwardKernel<T, 160, 4, 2, 3, kRms>, threads, 2, 2 * 3 * 3);
  } else if (threads <= 192) {
    launch(NormBackwardKernel<T, 192, 3, 2, 3, kRms>, threads, 2, 2 * 3 * 3);
  } else if (threads <= 256) {
    launch(NormBackwardKernel<T, 256, 2, 2, 2, kRms>, threads, 2, 2 * 2 * 3);
  } else if (threads <= 320) {
    launch(NormBackwardKernel<T, 320, 2, 2, 3, kRms>, threads, 2, 2 * 3 * 3);
  } else if (threads <= 512) {
    launch(NormBackwardKernel<T, 512, 1, 2, 3, kRms>, threads, 2, 2 * 3 * 3);
  } else if (threads <= 640) {
    launch(NormBackwardKernel<T, 640, 1, 1, 4, kRms>, threads, 1, 4 * 3);
  } else {
    launch(NormBackwardKernel<T, 1024, 1, 1, 3, kRms>, threads, 1, 3 * 3);
  }
}

template <typename T>
void Backward(CudaStream& stream, const LayerNormBackwardArgs& args) {
  const BackwardData<T> d{args.dy.as<T>(),     args.x.as<T>(),  AsFloatVector(args.gamma),
                          args.mean.f32(),     args.rstd.f32(), args.dx.as<T>(),
                          /*partial=*/nullptr, args.dy.dim(0),  static_cast<int>(args.dy.dim(1))};
  LaunchBackward<T, false>(stream, "LayerNormBackward", d, args.accumulate, args.dgamma.f32(),
                           args.dbeta.f32());
}

template <typename T>
void Backward(CudaStream& stream, const RmsNormBackwardArgs& args) {
  const BackwardData<T> d{args.dy.as<T>(),     args.x.as<T>(),  AsFloatVector(args.gamma),
                          /*mean=*/nullptr,    args.rstd.f32(), args.dx.as<T>(),
                          /*partial=*/nullptr, args.dy.dim(0),  static_cast<int>(args.dy.dim(1))};
  LaunchBackward<T, true>(stream, "RmsNormBackward", d, args.accumulate, args.dgamma.f32(),
                          nullptr);
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

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  if (args.residual.dim(0) == 0) return;
  DispatchFloat(args.residual.dtype(),
                [&](auto tag) { Forward<decltype(tag)>(CudaStream::Of(stream), args); });
}

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  if (args.dy.dim(0) == 0) return;
  DispatchFloat(args.dy.dtype(),
                [&](auto tag) { Backward<decltype(tag)>(CudaStream::Of(stream), args); });
}

}  // namespace muster::kernels::cuda
