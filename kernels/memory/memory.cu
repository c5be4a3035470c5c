// Zero, copy, cast, axpy, scale, add: bandwidth only, each byte once.
#include <string>

#include "kernels/cuda/elementwise.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {
namespace {

__global__ void ProbeKernel() {}

template <typename From, typename To>
struct CastElements {
  const From* from;
  To* to;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float x[N];
    LoadFloats<N>(from + i, x);
    StorePack<N>(to + i, FromFloats<To>(x));
  }
};

struct AxpyElements {
  float alpha;
  const float* x;
  float* y;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float a[N], b[N];
    LoadFloats<N>(x + i, a);
    LoadFloats<N>(y + i, b);
#pragma unroll
    for (int j = 0; j < N; ++j) b[j] += alpha * a[j];
    StorePack<N>(y + i, FromFloats<float>(b));
  }
};

template <typename T>
struct AddElements {
  const T* a;
  const T* b;
  T* out;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float x[N], y[N];
    LoadFloats<N>(a + i, x);
    LoadFloats<N>(b + i, y);
#pragma unroll
    for (int j = 0; j < N; ++j) x[j] += y[j];
    StorePack<N>(out + i, FromFloats<T>(x));
  }
};

template <typename T>
struct ScaleElements {
  float alpha;
  T* x;
  template <int N>
  __device__ void Apply(int64_t i) const {
    float a[N];
    LoadFloats<N>(x + i, a);
#pragma unroll
    for (int j = 0; j < N; ++j) a[j] *= alpha;
    StorePack<N>(x + i, FromFloats<T>(a));
  }
};

constexpr int kZeroedMax = 16;  // tensors of a launch
struct Zeroed {
  float* data[kZeroedMax];
  int64_t count[kZeroedMax];
};
// Block y takes tensor y.
__global__ void ZeroAllKernel(const Zeroed zeroed) {
  const int64_t count = zeroed.count[blockIdx.y], step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    zeroed.data[blockIdx.y][i] = 0;
  }
}

}  // namespace

cudaError_t ProbeArchitecture() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, ProbeKernel);
}

std::string BuiltArchitectures() { return MUSTER_CUDA_ARCHITECTURES; }

void Zero(Stream& stream, Tensor out) {
  CudaStream& cuda = CudaStream::Of(stream);
  cuda.Check(cudaMemsetAsync(out.data(), 0, out.bytes(), cuda.handle()), "Zero");
}

void ZeroAll(Stream& stream, const std::vector<Tensor>& outs) {
  CudaStream& cuda = CudaStream::Of(stream);
  constexpr unsigned kThreads = 256;
  for (size_t first = 0; first < outs.size(); first += kZeroedMax) {
    const size_t tensors = std::min<size_t>(kZeroedMax, outs.size() - first);
    Zeroed zeroed{};
    int64_t most = 0;
    for (size_t i = 0; i < tensors; ++i) {
      zeroed.data[i] = outs[first + i].f32();
      zeroed.count[i] = outs[first + i].elements();
      most = std::max(most, zeroed.count[i]);
    }
    if (most == 0) continue;
    const auto blocks = static_cast<unsigned>(std::min<int64_t>(CeilDiv(most, kThreads), 64));
    ZeroAllKernel<<<dim3(blocks, static_cast<unsigned>(tensors)), kThreads, 0, cuda.handle()>>>(
        zeroed);
  }
  cuda.CheckLaunch("ZeroAll");
}

void Copy(Stream& stream, Tensor from, Tensor to) {
  CudaStream& cuda = CudaStream::Of(stream);
  cuda.Check(
      cudaMemcpyAsync(to.data(), from.data(), from.bytes(), cudaMemcpyDefault, cuda.handle()),
      "Copy");
}

void Cast(Stream& stream, Tensor from, Tensor to) {
  if (from.dtype() == to.dtype()) return cuda::Copy(stream, from, to);
  DispatchFloat(from.dtype(), [&](auto a) {
    DispatchFloat(to.dtype(), [&](auto b) {
      using From = decltype(a);
      using To = decltype(b);
      // Packs by the narrower type; the wider one takes two accesses.
      constexpr int kN = kPackSize < From >> kPackSize<To> ? kPackSize<From> : kPackSize<To>;
      Elementwise<kN>(CudaStream::Of(stream), "Cast", from.elements(), {from.data(), to.data()},
                      CastElements<From, To>{from.as<From>(), to.as<To>()});
    });
  });
}

void Axpy(Stream& stream, float alpha, Tensor x, Tensor y) {
  Elementwise<4>(CudaStream::Of(stream), "Axpy", x.elements(), {x.data(), y.data()},
                 AxpyElements{alpha, x.f32(), y.f32()});
}

void Add(Stream& stream, Tensor a, Tensor b, Tensor out) {
  DispatchFloat(a.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Elementwise<kPackSize<T>>(CudaStream::Of(stream), "Add", a.elements(),
                              {a.data(), b.data(), out.data()},
                              AddElements<T>{a.as<T>(), b.as<T>(), out.as<T>()});
  });
}

void Scale(Stream& stream, float alpha, Tensor x) {
  DispatchFloat(x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Elementwise<kPackSize<T>>(CudaStream::Of(stream), "Scale", x.elements(), {x.data()},
                              ScaleElements<T>{alpha, x.as<T>()});
  });
}

}  // namespace muster::kernels::cuda
