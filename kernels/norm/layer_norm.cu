// Forward of layer norm and RMS norm, with the residual addition in front of them. An RMS norm is a
// layer norm whose mean is taken as 0, and without beta.
// A warp takes a row, or a block a long one. The row is held in registers, and mean and variance
// take two passes over them. Bytes: 2 reads and 2 writes of [T,C] (1 and 1 without a branch).
#include <algorithm>
#include <iterator>

#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/norm/norm.h"

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
  // Every load is issued before the first store, because the compiler must assume that they alias.
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
      // The norm is taken of the rounded sum, which backward will read.
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

// Any width and alignment. The row is read from the cache again in each pass.
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
struct Config {
  int lanes, items;
  void (*kernel)(ForwardData<T>);
};
// Ascending in the length of the rows that they hold; the first one that holds a row is taken.
template <typename T, bool kRms>
constexpr Config<T> kConfigs[] = {
    {kWarp, 1, NormForwardKernel<T, kWarp, 1, kRms>},
    {kWarp, 3, NormForwardKernel<T, kWarp, 3, kRms>},
    {kWarp, 4, NormForwardKernel<T, kWarp, 4, kRms>},
    {kWarp, 7, NormForwardKernel<T, kWarp, 7, kRms>},
    {kWarp, 8, NormForwardKernel<T, kWarp, 8, kRms>},
    {kWarp, 12, NormForwardKernel<T, kWarp, 12, kRms>},
    {kForwardThreads, 2, NormForwardKernel<T, kForwardThreads, 2, kRms>},
    {kForwardThreads, 3, NormForwardKernel<T, kForwardThreads, 3, kRms>},
    {kForwardThreads, 4, NormForwardKernel<T, kForwardThreads, 4, kRms>},
    {kForwardThreads, 8, NormForwardKernel<T, kForwardThreads, 8, kRms>},
};

// `packs`: rows are whole, aligned packs.
template <typename T, bool kRms>
void LaunchForward(CudaStream& stream, const char* op, const ForwardData<T>& d, bool packs) {
  const auto* const end = std::end(kConfigs<T, kRms>);
  const auto* const config = std::find_if(
      std::begin(kConfigs<T, kRms>), end,
      [&](const Config<T>& c) { return packs && d.columns <= c.lanes * c.items * kPackSize<T>; });
  if (config == end) {
    NormForwardAnyKernel<T, kRms>
        <<<static_cast<unsigned>(d.rows), kAnyThreads, 0, stream.handle()>>>(d);
  } else {
    const auto blocks = static_cast<unsigned>(CeilDiv(d.rows, kForwardThreads / config->lanes));
    config->kernel<<<blocks, kForwardThreads, 0, stream.handle()>>>(d);
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

}  // namespace

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  if (args.residual.dim(0) == 0) return;
  DispatchFloat(args.residual.dtype(),
                [&](auto tag) { Forward<decltype(tag)>(CudaStream::Of(stream), args); });
}

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  if (args.residual.dim(0) == 0) return;
  DispatchFloat(args.residual.dtype(),
                [&](auto tag) { Forward<decltype(tag)>(CudaStream::Of(stream), args); });
}

}  // namespace muster::kernels::cuda
