// Squared ReLU (activation.cuh) as a pass of its own.
#include "kernels/activation/activation.cuh"
#include "kernels/activation/activation.h"
#include "kernels/cuda/elementwise.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

template <typename T>
struct Relu2Elements {
  const T* x;
  T* y;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float v[N];
    LoadFloats<N>(x + i, v);
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = Relu2(v[j]);
    StorePack<N>(y + i, FromFloats<T>(v));
  }
};

template <typename T>
struct Relu2GradientElements {
  const T* x;
  const T* dy;
  T* dx;
  T* y;  // or null
  template <int N>
  __device__ void Apply(int64_t i) const {
    float v[N], g[N];
    LoadFloats<N>(x + i, v);
    LoadFloats<N>(dy + i, g);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      g[j] *= Relu2Slope(v[j]);
      v[j] = Relu2(v[j]);
    }
    StorePack<N>(dx + i, FromFloats<T>(g));
    if (y != nullptr) StorePack<N>(y + i, FromFloats<T>(v));
  }
};

}  // namespace

void Relu2Forward(Stream& stream, Tensor x, Tensor y) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Elementwise<kPackSize<T>>(CudaStream::Of(stream), "Relu2Forward", x.elements(),
                              {x.data(), y.data()}, Relu2Elements<T>{x.as<T>(), y.as<T>()});
  });
}

void Relu2Backward(Stream& stream, Tensor x, Tensor dy, Tensor dx, Tensor y) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    T* const out = y.empty() ? nullptr : y.as<T>();
    Elementwise<kPackSize<T>>(CudaStream::Of(stream), "Relu2Backward", x.elements(),
                              {x.data(), dy.data(), dx.data(), y.data()},
                              Relu2GradientElements<T>{x.as<T>(), dy.as<T>(), dx.as<T>(), out});
  });
}

}  // namespace muster::kernels::cuda
