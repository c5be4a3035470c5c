// GELU (activation.cuh) as a pass of its own.
//
// Backward with column sums: block (x, y) takes packs of columns [x * 32, +32) of rows y, y +
// gridDim.y, ..., as ColumnSum does (cuda/column_sum.cu), so that the bias gradient costs no pass
// of its own.
#include "kernels/activation/activation.cuh"
#include "kernels/activation/activation.h"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

template <typename T>
struct GeluElements {
  const T* x;
  T* y;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float v[N];
    LoadFloats<N>(x + i, v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = Gelu<T>(v[j]);
    StorePack<N>(y + i, FromFloats<T>(v));
  }
};

template <typename T>
struct GeluGradientElements {
  const T* x;
  const T* dy;
  T* dx;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float v[N], g[N];
    LoadFloats<N>(x + i, v);
    LoadFloats<N>(dy + i, g);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      float y;
      g[j] *= GeluSlope<T>(v[j], y);
    }
    StorePack<N>(dx + i, FromFloats<T>(g));
  }
};

constexpr int kSumWarps = 8;
constexpr int kSumRows = 4;  // of a warp, in flight

template <typename T, int N, bool kOutput>
__global__ void __launch_bounds__(kSumWarps* kWarp)
    GeluGradientSumKernel(const T* x, const T* dy, T* dx, T* y, int64_t rows, int64_t columns,
                          float* partial) {
  __shared__ float shared[kSumWarps][kWarp * N];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int64_t column = (static_cast<int64_t>(blockIdx.x) * kWarp + lane) * N;
  float sum[N] = {};
  constexpr int64_t kStep = kSumWarps * kSumRows;
  for (int64_t row = blockIdx.y * kStep + warp; column < columns && row < rows;
       row += gridDim.y * kStep) {
    Pack<T, N> in[kSumRows], gradient[kSumRows];
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
      const int64_t at = row + r * kSumWarps;
      if (at >= rows) continue;
      in[r] = LoadPack<N>(x + at * columns + column);
      gradient[r] = LoadPack<N>(dy + at * columns + column);
    }
#pragma unroll
    for (int r = 0; r < kSumRows; ++r) {
      const int64_t at = row + r * kSumWarps;
      if (at >= rows) continue;
      float g[N], out[N];
#pragma unroll
      for (int i = 0; i < N; ++i) g[i] = gradient[r][i] * GeluSlope<T>(in[r][i], out[i]);
      const Pack<T, N> rounded = FromFloats<T>(g);
      StorePack<N>(dx + at * columns + column, rounded);
      if constexpr (kOutput) StorePack<N>(y + at * columns + column, FromFloats<T>(out));
        // The sums are of the rounded values, which the next GEMM reads.
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += rounded[i];
    }
  }
  if (partial == nullptr) return;
#pragma unroll
  for (int i = 0; i < N; ++i) shared[warp][i * kWarp + lane] = sum[i];
  __syncthreads();
  for (int j = threadIdx.x; j < kWarp * N; j += blockDim.x) {
    float total = 0;
#pragma unroll
    for (int w = 0; w < kSumWarps; ++w) total += shared[w][j];
    const int64_t at = (static_cast<int64_t>(blockIdx.x) * kWarp + j % kWarp) * N + j / kWarp;
    if (at < columns) partial[blockIdx.y * columns + at] = total;
  }
}

template <typename T, int N>
void LaunchGradientSum(CudaStream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx,
                       const Tensor& y, const Tensor& dbias, bool accumulate, float* partial) {
  const int64_t rows = x.dim(0);
  const int64_t columns = x.dim(1);
  const int64_t column_blocks = CeilDiv(columns, kWarp * N);
  const int64_t blocks = ColumnSumBlocks(stream.cuda_device(), rows, column_blocks);
  const dim3 grid(static_cast<unsigned>(column_blocks), static_cast<unsigned>(blocks));
  const auto launch = [&](auto kernel) {
    kernel<<<grid, kSumWarps * kWarp, 0, stream.handle()>>>(
        x.as<T>(), dy.as<T>(), dx.as<T>(), y.empty() ? nullptr : y.as<T>(), rows, columns,
        dbias.empty() ? nullptr : partial);
  };
  if (y.empty()) {
    launch(GeluGradientSumKernel<T, N, false>);
  } else {
    launch(GeluGradientSumKernel<T, N, true>);
  }
  stream.CheckLaunch("GeluBackwardAndSum");
  if (!dbias.empty()) {
    AddPartials(stream, partial, blocks, columns, accumulate, dbias.f32(), nullptr);
  }
}

}  // namespace

void GeluBackwardAndSum(CudaStream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx,
                        const Tensor& y, const Tensor& dbias, bool accumulate, void* scratch) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    auto* partial = static_cast<float*>(scratch);
    if (Aligned16(x) && Aligned16(dy) && Aligned16(dx) && Aligned16(y) &&
        x.dim(1) % kPackSize<T> == 0) {
      LaunchGradientSum<T, kPackSize<T>>(stream, x, dy, dx, y, dbias, accumulate, partial);
    } else {
      LaunchGradientSum<T, 1>(stream, x, dy, dx, y, dbias, accumulate, partial);
    }
  });
}

void GeluForward(Stream& stream, Tensor x, Tensor y) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Elementwise<kPackSize<T>>(CudaStream::Of(stream), "GeluForward", x.elements(),
                              {x.data(), y.data()}, GeluElements<T>{x.as<T>(), y.as<T>()});
  });
}

void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Elementwise<kPackSize<T>>(CudaStream::Of(stream), "GeluBackward", x.elements(),
                              {x.data(), dy.data(), dx.data()},
                              GeluGradientElements<T>{x.as<T>(), dy.as<T>(), dx.as<T>()});
  });
}

}  // namespace muster::kernels::cuda
