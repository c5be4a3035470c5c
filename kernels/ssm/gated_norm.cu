// Gated RMS norm. A block takes rows of one group one after the other; a second look at a row comes
// from the L1 cache. Bytes: forward [T,2W] in, [T,W] out; backward [T,3W] in, [T,2W] out, and a
// partial sum of gamma's gradient for each block.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreadsMax = 256;
constexpr int64_t kBlocksOfMultiprocessor = 8;

template <typename T>
struct Rows {
  T* data;
  int64_t row;  // stride

  __device__ T* At(int64_t t, int64_t w) const { return data + t * row + w; }
};
template <typename T>
Rows<T> RowsOf(const Tensor& tensor) {
  if (tensor.empty()) return {nullptr, 0};
  return {tensor.as<T>(), tensor.stride(0)};
}

template <typename T>
struct Problem {
  Rows<T> y, z, out;
  const float* gamma;
  float* rstd;
  int64_t rows, groups, width;  // width of a group
  bool gate_behind;             // out = norm(y) gamma silu(z)
  float epsilon;

  Rows<T> dout, dy, dz;
  float* gamma_sums;  // [blocks of a group, groups * width]
};

__device__ inline float Sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

// What the norm reads, and the gate behind it.
struct Element {
  float value, gate;

  __device__ Element(float y, float z, bool gate_behind) {
    const float silu = z * Sigmoid(z);
    value = gate_behind ? y : y * silu;
    gate = gate_behind ? silu : 1.0f;
  }
};

template <typename T, int N>
__global__ void __launch_bounds__(kThreadsMax) ForwardKernel(const Problem<T> p) {
  __shared__ float shared[2][32];
  const int64_t begin = blockIdx.y * p.width;
  int turn = 0;
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x, turn ^= 1) {
    float squares = 0;
    for (int64_t w = threadIdx.x * N; w < p.width; w += int64_t{N} * blockDim.x) {
      float y[N], z[N];
      LoadFloats<N>(p.y.At(t, begin + w), y);
      LoadFloats<N>(p.z.At(t, begin + w), z);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const float value = Element(y[i], z[i], p.gate_behind).value;
        squares += value * value;
      }
    }
    const float mean = BlockSum(squares, shared[turn]) / static_cast<float>(p.width);
    const float rstd = 1.0f / sqrtf(mean + p.epsilon);
    if (threadIdx.x == 0) p.rstd[t * p.groups + blockIdx.y] = rstd;
    for (int64_t w = threadIdx.x * N; w < p.width; w += int64_t{N} * blockDim.x) {
      float y[N], z[N];
      LoadFloats<N>(p.y.At(t, begin + w), y);
      LoadFloats<N>(p.z.At(t, begin + w), z);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Element element(y[i], z[i], p.gate_behind);
        y[i] = element.value * rstd * p.gamma[begin + w + i] * element.gate;
      }
      StorePack<N>(p.out.At(t, begin + w), FromFloats<T>(y));
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreadsMax) BackwardKernel(const Problem<T> p) {
  extern __shared__ float sums[];  // of gamma, [width]; a thread adds to its own columns
  __shared__ float shared[2][32];
  const int64_t begin = blockIdx.y * p.width;
  for (int64_t w = threadIdx.x * N; w < p.width; w += int64_t{N} * blockDim.x) {
#pragma unroll
    for (int i = 0; i < N; ++i) sums[w + i] = 0;
  }
  int turn = 0;
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x, turn ^= 1) {
    const float rstd = p.rstd[t * p.groups + blockIdx.y];
    float dot = 0;
    for (int64_t w = threadIdx.x * N; w < p.width; w += int64_t{N} * blockDim.x) {
      float y[N], z[N], dout[N];
      LoadFloats<N>(p.y.At(t, begin + w), y);
      LoadFloats<N>(p.z.At(t, begin + w), z);
      LoadFloats<N>(p.dout.At(t, begin + w), dout);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Element element(y[i], z[i], p.gate_behind);
        const float own = dout[i] * element.gate * element.value;
        sums[w + i] += own * rstd;
        dot += own * p.gamma[begin + w + i];
      }
    }
    const float mean = BlockSum(dot, shared[turn]) / static_cast<float>(p.width);
    const float factor = rstd * rstd * mean;
    for (int64_t w = threadIdx.x * N; w < p.width; w += int64_t{N} * blockDim.x) {
      float y[N], z[N], dout[N];
      LoadFloats<N>(p.y.At(t, begin + w), y);
      LoadFloats<N>(p.z.At(t, begin + w), z);
      LoadFloats<N>(p.dout.At(t, begin + w), dout);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const Element element(y[i], z[i], p.gate_behind);
        const float scaled = dout[i] * p.gamma[begin + w + i];
        const float d = rstd * (scaled * element.gate - element.value * factor);
        const float s = Sigmoid(z[i]);
        const float d_silu = s * (1 + z[i] * (1 - s));
        dout[i] = p.gate_behind ? d : d * z[i] * s;
        z[i] = (p.gate_behind ? scaled * rstd : d) * y[i] * d_silu;
      }
      StorePack<N>(p.dy.At(t, begin + w), FromFloats<T>(dout));
      StorePack<N>(p.dz.At(t, begin + w), FromFloats<T>(z));
    }
  }
  float* const to = p.gamma_sums + (blockIdx.x * p.groups + blockIdx.y) * p.width;
  for (int64_t w = threadIdx.x * N; w < p.width; w += int64_t{N} * blockDim.x) {
#pragma unroll
    for (int i = 0; i < N; ++i) to[w + i] = sums[w + i];
  }
}

template <typename T>
Problem<T> Describe(const GatedRmsNormArgs& args) {
  Problem<T> p{};
  p.y = RowsOf<T>(args.y);
  p.z = RowsOf<T>(args.z);
  p.out = RowsOf<T>(args.out);
  p.gamma = args.gamma.f32();
  p.rstd = args.rstd.f32();
  p.rows = args.y.dim(0);
  p.groups = args.groups;
  p.width = args.y.dim(1) / args.groups;
  p.gate_behind = args.norm_before_gate;
  p.epsilon = args.epsilon;
  return p;
}

template <typename T>
bool Packs(std::initializer_list<const Tensor*> tensors, int64_t group_width) {
  if (group_width % kPackSize<T> != 0) return false;
  return std::all_of(tensors.begin(), tensors.end(), [](const Tensor* tensor) {
    return Aligned16(*tensor) && tensor->stride(0) % kPackSize<T> == 0;
  });
}

// Calls launch(elements of a pack as a constant, threads).
template <typename T, typename Launch>
void ForPacks(bool packed, int64_t width, Launch launch) {
  const auto with = [&](auto n) {
    const int64_t threads = std::min<int64_t>(kThreadsMax, CeilDiv(width, int64_t{n()} * 32) * 32);
    launch(n, static_cast<unsigned>(threads));
  };
  if (packed) return with(std::integral_constant<int, kPackSize<T>>());
  with(std::integral_constant<int, 1>());
}

unsigned BlocksOfGroup(CudaStream& stream, int64_t rows, int64_t groups) {
  const int64_t blocks = stream.cuda_device().multiprocessors() * kBlocksOfMultiprocessor;
  return static_cast<unsigned>(std::min(rows, CeilDiv(blocks, groups)));
}

}  // namespace

void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.y.elements() == 0) return;
  DispatchFloat(args.y.dtype(), [&](auto tag) {
    using T = decltype(tag);
    const Problem<T> p = Describe<T>(args);
    const bool packed = Packs<T>({&args.y, &args.z, &args.out}, p.width);
    ForPacks<T>(packed, p.width, [&](auto n, unsigned threads) {
      const dim3 grid(BlocksOfGroup(cuda, p.rows, p.groups), static_cast<unsigned>(p.groups));
      ForwardKernel<T, n()><<<grid, threads, 0, cuda.handle()>>>(p);
    });
  });
  cuda.CheckLaunch("GatedRmsNormForward");
}

void GatedRmsNormBackward(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.dout.elements() == 0) return;
  DispatchFloat(args.dout.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Problem<T> p = Describe<T>(args.forward);
    p.dout = RowsOf<T>(args.dout);
    p.dy = RowsOf<T>(args.dy);
    p.dz = RowsOf<T>(args.dz);
    const bool packed =
        Packs<T>({&args.forward.y, &args.forward.z, &args.dout, &args.dy, &args.dz}, p.width);
    const unsigned blocks = BlocksOfGroup(cuda, p.rows, p.groups);
    p.gamma_sums = static_cast<float*>(cuda.Scratch(int64_t{blocks} * p.groups * p.width * 4));
    if (p.gamma_sums == nullptr) return;
    ForPacks<T>(packed, p.width, [&](auto n, unsigned threads) {
      const auto kernel = BackwardKernel<T, n()>;
      const int64_t bytes = p.width * 4;
      cuda.Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(bytes)),
                 "GatedRmsNormBackward");
      const dim3 grid(blocks, static_cast<unsigned>(p.groups));
      kernel<<<grid, threads, static_cast<size_t>(bytes), cuda.handle()>>>(p);
    });
    AddPartials(cuda, p.gamma_sums, blocks, p.groups * p.width, true, args.dgamma.f32(), nullptr);
  });
  cuda.CheckLaunch("GatedRmsNormBackward");
}

}  // namespace muster::kernels::cuda
