// SwiGLU (activation.cuh) as a pass of its own. A thread takes a pack of columns of one row. Bytes:
// forward [T,2F] in, [T,F] out; backward [T,3F] in, [T,2F] out, and [T,F] more where y is
// recomputed.
#include "kernels/activation/activation.cuh"
#include "kernels/activation/activation.h"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 256;

// The row and the first column of this thread; false when it has none. A row takes `blocks_of_row`
// blocks.
template <int N>
__device__ bool Locate(int64_t columns, int blocks_of_row, int64_t& row, int64_t& column) {
  row = blockIdx.x / blocks_of_row;
  column = (static_cast<int64_t>(blockIdx.x % blocks_of_row) * kThreads + threadIdx.x) * N;
  return column < columns;
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    ForwardKernel(const T* packed, T* y, int64_t columns, int blocks_of_row) {
  int64_t row, column;
  if (!Locate<N>(columns, blocks_of_row, row, column)) return;
  float gate[N], up[N];
  LoadFloats<N>(packed + row * 2 * columns + column, gate);
  LoadFloats<N>(packed + row * 2 * columns + columns + column, up);
#pragma unroll
  for (int i = 0; i < N; ++i) up[i] = Swiglu(gate[i], up[i]);
  StorePack<N>(y + row * columns + column, FromFloats<T>(up));
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    BackwardKernel(const T* packed, const T* dy, T* d_packed, T* y, int64_t columns,
                   int blocks_of_row) {
  int64_t row, column;
  if (!Locate<N>(columns, blocks_of_row, row, column)) return;
  float gate[N], up[N], d[N];
  LoadFloats<N>(packed + row * 2 * columns + column, gate);
  LoadFloats<N>(packed + row * 2 * columns + columns + column, up);
  LoadFloats<N>(dy + row * columns + column, d);
#pragma unroll
  for (int i = 0; i < N; ++i) SwigluGradient(gate[i], up[i], d[i]);  // d becomes y
  StorePack<N>(d_packed + row * 2 * columns + column, FromFloats<T>(gate));
  StorePack<N>(d_packed + row * 2 * columns + columns + column, FromFloats<T>(up));
  if (y != nullptr) StorePack<N>(y + row * columns + column, FromFloats<T>(d));
}

// Calls launch(N as a constant, blocks, blocks of a row).
template <typename T, typename Launch>
void ForRows(const Tensor& y, bool aligned, Launch launch) {
  const auto go = [&](auto width) {
    const int64_t blocks_of_row = CeilDiv(y.dim(1), int64_t{kThreads} * width());
    launch(width, static_cast<unsigned>(y.dim(0) * blocks_of_row), static_cast<int>(blocks_of_row));
  };
  constexpr int N = kPackSize<T>;
  if (aligned && y.dim(1) % N == 0) {
    go(std::integral_constant<int, N>());
  } else {
    go(std::integral_constant<int, 1>());
  }
}

}  // namespace

void SwigluForward(Stream& stream, Tensor packed, Tensor y) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (y.elements() == 0) return;
  DispatchFloat(y.dtype(), [&](auto tag) {
    using T = decltype(tag);
    ForRows<T>(y, Aligned16(packed) && Aligned16(y),
               [&](auto width, unsigned blocks, int blocks_of_row) {
                 ForwardKernel<T, width()><<<blocks, kThreads, 0, cuda.handle()>>>(
                     packed.as<T>(), y.as<T>(), y.dim(1), blocks_of_row);
               });
  });
  cuda.CheckLaunch("SwigluForward");
}

void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (dy.elements() == 0) return;
  DispatchFloat(dy.dtype(), [&](auto tag) {
    using T = decltype(tag);
    const bool aligned = Aligned16(packed) && Aligned16(dy) && Aligned16(d_packed) && Aligned16(y);
    ForRows<T>(dy, aligned, [&](auto width, unsigned blocks, int blocks_of_row) {
      BackwardKernel<T, width()><<<blocks, kThreads, 0, cuda.handle()>>>(
          packed.as<T>(), dy.as<T>(), d_packed.as<T>(), y.empty() ? nullptr : y.as<T>(), dy.dim(1),
          blocks_of_row);
    });
  });
  cuda.CheckLaunch("SwigluBackward");
}

}  // namespace muster::kernels::cuda
