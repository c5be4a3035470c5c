// Causal depthwise convolution with SiLU. A thread takes a few channels of a run of positions and
// keeps the inputs that later positions read in registers: forward reads x once and writes y once,
// backward reads x and dy and writes dx. Sums over positions go through partial sums of the runs,
// which are added in their order.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTapsMax = 4;
constexpr int64_t kRunMin = 32;
constexpr int64_t kThreadsOfMultiprocessor = 1024;
// Rows that a thread loads before it uses the first.
constexpr int kForwardRows = 8;
constexpr int kBackwardRows = 4;

template <typename T>
struct Rows {
  T* data;
  int64_t sample, row;  // strides

  __device__ T* At(int64_t b, int64_t t, int64_t w) const {
    return data + b * sample + t * row + w;
  }
};
template <typename T>
Rows<T> RowsOf(const Tensor& tensor) {
  if (tensor.empty()) return {nullptr, 0, 0};
  return {tensor.as<T>(), tensor.stride(0), tensor.stride(1)};
}

template <typename T>
struct Problem {
  Rows<T> x, halo, y;
  Rows<int32_t> documents;
  const float* weight;
  const float* bias;
  int64_t samples, positions, width, first_position;
  int64_t run, runs;  // positions of a run, runs of a sample

  // Backward.
  Rows<T> dy, dx;
  Rows<float> d_halo;
  T* heads;            // [samples, runs, taps - 1, width]: dy in front of dx, or null
  float* weight_sums;  // [samples * runs, width * taps]
  float* bias_sums;    // [samples * runs, width]
};

// The place of a thread: a pack of N channels of a run.
template <int N>
struct Place {
  int64_t b, run, w;
  bool inside;

  template <typename T>
  __device__ explicit Place(const Problem<T>& p) {
    const int64_t packs = p.width / N;
    const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    w = at % packs * N;
    run = at / packs % p.runs;
    b = at / packs / p.runs;
    inside = b < p.samples;
  }
};

template <int N, typename T>
__device__ void LoadInput(const Problem<T>& p, int taps, int64_t b, int64_t t, int64_t w,
                          float (&out)[N]) {
  if (t >= 0 && t < p.positions) {
    LoadFloats<N>(p.x.At(b, t, w), out);
  } else if (t < 0 && p.halo.data != nullptr) {
    LoadFloats<N>(p.halo.At(b, t + taps - 1, w), out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = 0;
  }
}

// How many of the taps, counted from the last, stay within the document of position t.
template <typename T>
__device__ int TapsWithin(const Problem<T>& p, int taps, int64_t b, int64_t t) {
  if (p.documents.data == nullptr) return taps;
  const int64_t before = p.first_position + t - *p.documents.At(b, t, 0);
  return before + 1 < taps ? static_cast<int>(before) + 1 : taps;
}

template <int K, int N>
struct Filter {
  float tap[K][N], bias[N];

  __device__ Filter(const float* weight, const float* biases, int64_t w) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      bias[i] = biases[w + i];
#pragma unroll
      for (int k = 0; k < K; ++k) tap[k][i] = weight[(w + i) * K + k];
    }
  }
  // `inputs` of the positions t - (K - 1) to t; the last `within` of them count.
  __device__ void Convolve(const float (&inputs)[K][N], int within, float (&out)[N]) const {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = bias[i];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < K - within) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) out[i] += tap[k][i] * inputs[k][i];
    }
  }
};

__device__ inline float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

template <int K, int N>
__device__ void Shift(float (&rows)[K][N]) {
#pragma unroll
  for (int k = 0; k + 1 < K; ++k) {
#pragma unroll
    for (int i = 0; i < N; ++i) rows[k][i] = rows[k + 1][i];
  }
}

// Loads kRows rows from position t on, as they are; those from `end` on are zero.
template <int kRows, int N, typename T>
__device__ void LoadPacks(const Rows<T>& from, int64_t b, int64_t t, int64_t end, int64_t w,
                          Pack<T, N> (&packs)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    packs[r] = t + r < end ? LoadPack<N>(from.At(b, t + r, w)) : Pack<T, N>{};
  }
}

template <typename T, int K, int N>
__global__ void __launch_bounds__(kThreads) ForwardKernel(const Problem<T> p) {
  const Place<N> at(p);
  if (!at.inside) return;
  const Filter<K, N> filter(p.weight, p.bias, at.w);
  const int64_t begin = at.run * p.run, end = min(p.positions, begin + p.run);
  float inputs[K][N];
#pragma unroll
  for (int k = 1; k < K; ++k) LoadInput<N>(p, K, at.b, begin - K + k, at.w, inputs[k]);
  for (int64_t first = begin; first < end; first += kForwardRows) {
    Pack<T, N> packs[kForwardRows];
    LoadPacks(p.x, at.b, first, end, at.w, packs);
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      if (first + r >= end) break;
      Shift(inputs);
      ToFloats(packs[r], inputs[K - 1]);
      float y[N];
      filter.Convolve(inputs, TapsWithin(p, K, at.b, first + r), y);
#pragma unroll
      for (int i = 0; i < N; ++i) y[i] *= Sigmoid(y[i]);
      StorePack<N>(p.y.At(at.b, first + r, at.w), FromFloats<T>(y));
    }
  }
}

// Keeps the first rows of dy of each run, which the run in front of it needs too: dx may be written
// over them.
template <typename T, int K, int N>
__global__ void __launch_bounds__(kThreads) KeepHeadsKernel(const Problem<T> p) {
  const Place<N> at(p);
  if (!at.inside) return;
  for (int64_t j = 0; j < K - 1; ++j) {
    const int64_t t = at.run * p.run + j;
    if (t >= p.positions) return;
    const int64_t row = (at.b * p.runs + at.run) * (K - 1) + j;
    StorePack<N>(p.heads + row * p.width + at.w, LoadPack<N>(p.dy.At(at.b, t, at.w)));
  }
}

// dy from position t on; from `end` on, the next run's, which it may have overwritten.
template <int kRows, int N, typename T>
__device__ void LoadGradients(const Problem<T>& p, int halo, const Place<N>& at, int64_t t,
                              int64_t end, Pack<T, N> (&packs)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    packs[r] = Pack<T, N>{};
    if (t + r < end || (p.heads == nullptr && t + r < p.positions)) {
      packs[r] = LoadPack<N>(p.dy.At(at.b, t + r, at.w));
    } else if (t + r < min(p.positions, end + halo)) {
      // A run is no shorter than the halo.
      const int64_t row = (at.b * p.runs + at.run + 1) * halo + (t + r - end);
      packs[r] = LoadPack<N>(p.heads + row * p.width + at.w);
    }
  }
}

template <typename T, int K, int N>
__global__ void __launch_bounds__(kThreads) BackwardKernel(const Problem<T> p) {
  const Place<N> at(p);
  if (!at.inside) return;
  const Filter<K, N> filter(p.weight, p.bias, at.w);
  const int64_t begin = at.run * p.run, end = min(p.positions, begin + p.run);
  const bool writes_halo = begin == 0 && p.d_halo.data != nullptr;
  float inputs[K][N], sums[K + 1][N] = {};
  // pending[k]: the gradient of the input that tap k reads, so far.
  float pending[K][N] = {};
#pragma unroll
  for (int k = 1; k < K; ++k) LoadInput<N>(p, K, at.b, begin - K + k, at.w, inputs[k]);
  for (int64_t first = begin; first < end + K - 1; first += kBackwardRows) {
    Pack<T, N> xs[kBackwardRows], dys[kBackwardRows];
    LoadPacks(p.x, at.b, first, p.positions, at.w, xs);
    LoadGradients(p, K - 1, at, first, end, dys);
#pragma unroll
    for (int r = 0; r < kBackwardRows; ++r) {
      const int64_t t = first + r;
      if (t >= end + K - 1) break;
      Shift(inputs);
      Shift(pending);
#pragma unroll
      for (int i = 0; i < N; ++i) pending[K - 1][i] = 0;
      if (t < p.positions) {
        ToFloats(xs[r], inputs[K - 1]);
        float d[N], value[N];
        ToFloats(dys[r], d);
        const float own = t < end ? 1 : 0;
        const int within = TapsWithin(p, K, at.b, t);
        filter.Convolve(inputs, within, value);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          const float s = Sigmoid(value[i]);
          d[i] *= s * (1 + value[i] * (1 - s));
          value[i] = d[i] * own;
          sums[K][i] += value[i];
        }
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (k < K - within) continue;
#pragma unroll
          for (int i = 0; i < N; ++i) {
            sums[k][i] += value[i] * inputs[k][i];
            pending[k][i] += d[i] * filter.tap[k][i];
          }
        }
      }
      const int64_t input = t - (K - 1);  // has all its gradient
      if (input >= begin) {
        StorePack<N>(p.dx.At(at.b, input, at.w), FromFloats<T>(pending[0]));
      } else if (input < 0 && writes_halo) {
        StorePack<N>(p.d_halo.At(at.b, input + K - 1, at.w), FromFloats<float>(pending[0]));
      }
    }
  }
  const int64_t row = at.b * p.runs + at.run;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    p.bias_sums[row * p.width + at.w + i] = sums[K][i];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      p.weight_sums[(row * p.width + at.w + i) * K + k] = sums[k][i];
    }
  }
}

template <typename T>
Problem<T> Describe(CudaStream& stream, const CausalConvArgs& args, int width_of_pack) {
  Problem<T> p{};
  p.x = RowsOf<T>(args.x);
  p.halo = RowsOf<T>(args.halo);
  p.y = RowsOf<T>(args.y);
  p.documents = RowsOf<int32_t>(args.documents);
  p.weight = args.weight.f32();
  p.bias = args.bias.f32();
  p.samples = args.x.dim(0);
  p.positions = args.x.dim(1);
  p.width = args.x.dim(2);
  p.first_position = args.first_position;
  // Enough runs to fill the device, and long ones beyond that.
  const int64_t threads = stream.cuda_device().multiprocessors() * kThreadsOfMultiprocessor;
  const int64_t wanted =
      CeilDiv(threads, std::max<int64_t>(1, p.width / width_of_pack * p.samples));
  p.run = std::max(kRunMin, CeilDiv(p.positions, wanted));
  p.runs = CeilDiv(p.positions, p.run);
  return p;
}

// Whether packs of N elements of the tensor are aligned in every row.
template <typename T>
bool Packs(const Tensor& tensor, int n) {
  if (tensor.empty()) return true;
  return reinterpret_cast<uintptr_t>(tensor.data()) % (sizeof(T) * static_cast<size_t>(n)) == 0 &&
         tensor.stride(0) % n == 0 && tensor.stride(1) % n == 0;
}

// Calls f(taps, channels of a thread), both as constants.
template <typename F>
void ForTaps(int64_t taps, bool packed, F f) {
  const auto with = [&](auto k) {
    if (packed) {
      f(k, std::integral_constant<int, 4>());
    } else {
      f(k, std::integral_constant<int, 1>());
    }
  };
  if (taps == 2) return with(std::integral_constant<int, 2>());
  if (taps == 3) return with(std::integral_constant<int, 3>());
  with(std::integral_constant<int, kTapsMax>());
}

template <typename T>
unsigned Blocks(const Problem<T>& p, int n) {
  return static_cast<unsigned>(CeilDiv(p.samples * p.runs * (p.width / n), kThreads));
}

}  // namespace

void CausalConvForward(Stream& stream, const CausalConvArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.x.elements() == 0) return;
  DispatchFloat(args.x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    bool packed = args.x.dim(2) % 4 == 0;
    for (const Tensor* tensor : {&args.x, &args.halo, &args.y}) {
      packed = packed && Packs<T>(*tensor, 4);
    }
    ForTaps(args.weight.dim(1), packed, [&](auto k, auto n) {
      const Problem<T> p = Describe<T>(cuda, args, n());
      ForwardKernel<T, k(), n()><<<Blocks(p, n()), kThreads, 0, cuda.handle()>>>(p);
    });
  });
  cuda.CheckLaunch("CausalConvForward");
}

void CausalConvBackward(Stream& stream, const CausalConvBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  const CausalConvArgs& forward = args.forward;
  if (forward.x.elements() == 0) return;
  DispatchFloat(forward.x.dtype(), [&](auto tag) {
    using T = decltype(tag);
    bool packed = forward.x.dim(2) % 4 == 0 && Packs<float>(args.d_halo, 4);
    for (const Tensor* tensor : {&forward.x, &forward.halo, &args.dy, &args.dx}) {
      packed = packed && Packs<T>(*tensor, 4);
    }
    ForTaps(forward.weight.dim(1), packed, [&](auto k, auto n) {
      Problem<T> p = Describe<T>(cuda, forward, n());
      p.dy = RowsOf<T>(args.dy);
      p.dx = RowsOf<T>(args.dx);
      p.d_halo = RowsOf<float>(args.d_halo);
      const bool aliased = args.dy.data() == args.dx.data();
      const int64_t rows = p.samples * p.runs;
      const int64_t weights = rows * p.width * k();
      const int64_t heads = aliased ? rows * (k() - 1) * p.width : 0;
      auto* const scratch = static_cast<float*>(
          cuda.Scratch((weights + rows * p.width) * 4 + heads * static_cast<int64_t>(sizeof(T))));
      if (scratch == nullptr) return;
      p.weight_sums = scratch;
      p.bias_sums = scratch + weights;
      if (aliased) {
        p.heads = reinterpret_cast<T*>(p.bias_sums + rows * p.width);
        KeepHeadsKernel<T, k(), n()><<<Blocks(p, n()), kThreads, 0, cuda.handle()>>>(p);
      }
      BackwardKernel<T, k(), n()><<<Blocks(p, n()), kThreads, 0, cuda.handle()>>>(p);
      AddPartials(cuda, p.weight_sums, rows, p.width * k(), true, args.dweight.f32(), nullptr);
      AddPartials(cuda, p.bias_sums, rows, p.width, true, args.dbias.f32(), nullptr);
    });
  });
  cuda.CheckLaunch("CausalConvBackward");
}

}  // namespace muster::kernels::cuda
