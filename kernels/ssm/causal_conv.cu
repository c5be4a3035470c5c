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
template <bool kDocuments, typename T>
__device__ int TapsWithin(const Problem<T>& p, int taps, int64_t b, int64_t t) {
  if constexpr (!kDocuments) return taps;
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

// Loads kRows rows, of which there are `rows`, as they are; others are zero.
template <int kRows, int N, typename T>
__device__ void LoadPacks(const T* from, int64_t pitch, int rows, Pack<T, N> (&packs)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r)
    packs[r] = r < rows ? LoadPack<N>(from + r * pitch) : Pack<T, N>{};
}

template <typename T, int K, int N, bool kDocuments>
__global__ void __launch_bounds__(kThreads, 6) ForwardKernel(const Problem<T> p) {
  const Place<N> at(p);
  if (!at.inside) return;
  const Filter<K, N> filter(p.weight, p.bias, at.w);
  const int64_t begin = at.run * p.run, end = min(p.positions, begin + p.run);
  float inputs[K][N];
#pragma unroll
  for (int k = 1; k < K; ++k) LoadInput<N>(p, K, at.b, begin - K + k, at.w, inputs[k]);
  const T* x = p.x.At(at.b, begin, at.w);
  T* y = p.y.At(at.b, begin, at.w);
  const int rows = static_cast<int>(end - begin);
  for (int first = 0; first < rows; first += kForwardRows) {
    Pack<T, N> packs[kForwardRows];
    LoadPacks(x, p.x.row, rows - first, packs);
#pragma unroll
    for (int r = 0; r < kForwardRows; ++r) {
      if (first + r >= rows) break;
      Shift(inputs);
      ToFloats(packs[r], inputs[K - 1]);
      float value[N];
      filter.Convolve(inputs, TapsWithin<kDocuments>(p, K, at.b, begin + first + r), value);
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] *= Sigmoid(value[i]);
      StorePack<N>(y, FromFloats<T>(value));
      y += p.y.row;
    }
    x += kForwardRows * p.x.row;
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

// What a thread of backward sums: over positions, by tap and for the bias; and for each of the
// latest inputs, over the outputs that read it.
template <int K, int N>
struct Gradients {
  float sums[K + 1][N] = {}, pending[K][N] = {};

  // An output whose gradient is d, of a position whose run is another thread's unless `own`.
  __device__ void Add(const Filter<K, N>& filter, const float (&inputs)[K][N], int within, bool own,
                      float (&d)[N]) {
    float value[N];
    filter.Convolve(inputs, within, value);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float s = Sigmoid(value[i]);
      d[i] *= s * (1 + value[i] * (1 - s));
      if (own) sums[K][i] += d[i];
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (k < K - within) continue;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        if (own) sums[k][i] += d[i] * inputs[k][i];
        pending[k][i] += d[i] * filter.tap[k][i];
      }
    }
  }
  __device__ void Next() {
    Shift(pending);
#pragma unroll
    for (int i = 0; i < N; ++i) pending[K - 1][i] = 0;
  }
};

template <typename T, int K, int N, bool kDocuments>
__global__ void __launch_bounds__(kThreads, 4) BackwardKernel(const Problem<T> p) {
  const Place<N> at(p);
  if (!at.inside) return;
  const Filter<K, N> filter(p.weight, p.bias, at.w);
  const int64_t begin = at.run * p.run, end = min(p.positions, begin + p.run);
  const bool writes_halo = begin == 0 && p.d_halo.data != nullptr;
  float inputs[K][N];
  Gradients<K, N> gradients;
#pragma unroll
  for (int k = 1; k < K; ++k) LoadInput<N>(p, K, at.b, begin - K + k, at.w, inputs[k]);
  const T* x = p.x.At(at.b, begin, at.w);
  const T* dy = p.dy.At(at.b, begin, at.w);
  T* dx = p.dx.At(at.b, begin, at.w);
  const int rows = static_cast<int>(end - begin);
  // The input that is K - 1 positions in front of row r has all its gradient.
  const auto write = [&](int r) {
    if (r >= K - 1) {
      StorePack<N>(dx, FromFloats<T>(gradients.pending[0]));
      dx += p.dx.row;
    } else if (writes_halo) {
      StorePack<N>(p.d_halo.At(at.b, r, at.w), FromFloats<float>(gradients.pending[0]));
    }
  };
  for (int first = 0; first < rows; first += kBackwardRows) {
    Pack<T, N> xs[kBackwardRows], dys[kBackwardRows];
    LoadPacks(x, p.x.row, rows - first, xs);
    LoadPacks(dy, p.dy.row, rows - first, dys);
#pragma unroll
    for (int r = 0; r < kBackwardRows; ++r) {
      if (first + r >= rows) break;
      Shift(inputs);
      gradients.Next();
      float d[N];
      ToFloats(xs[r], inputs[K - 1]);
      ToFloats(dys[r], d);
      gradients.Add(filter, inputs, TapsWithin<kDocuments>(p, K, at.b, begin + first + r), true, d);
      write(first + r);
    }
    x += kBackwardRows * p.x.row;
    dy += kBackwardRows * p.dy.row;
  }
  // The first positions of the next run read inputs of this one.
#pragma unroll 1
  for (int r = 0; r < K - 1; ++r) {
    const int64_t t = end + r;
    Shift(inputs);
    gradients.Next();
    if (t < p.positions) {
      float d[N];
      LoadFloats<N>(p.x.At(at.b, t, at.w), inputs[K - 1]);
      if (p.heads == nullptr) {
        LoadFloats<N>(p.dy.At(at.b, t, at.w), d);
      } else {
        const int64_t head = (at.b * p.runs + at.run + 1) * (K - 1) + r;
        LoadFloats<N>(p.heads + head * p.width + at.w, d);
      }
      gradients.Add(filter, inputs, TapsWithin<kDocuments>(p, K, at.b, t), false, d);
    }
    write(rows + r);
  }
  const int64_t row = at.b * p.runs + at.run;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    p.bias_sums[row * p.width + at.w + i] = gradients.sums[K][i];
#pragma unroll
    for (int k = 0; k < K; ++k) {
      p.weight_sums[(row * p.width + at.w + i) * K + k] = gradients.sums[k][i];
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

// Calls f(taps, channels of a thread, whether there are documents), all as constants.
template <typename F>
void ForTaps(int64_t taps, bool packed, bool documents, F f) {
  const auto choose = [&](auto k, auto n) {
    if (documents) {
      f(k, n, std::true_type());
    } else {
      f(k, n, std::false_type());
    }
  };
  const auto with = [&](auto k) {
    if (packed) {
      choose(k, std::integral_constant<int, 4>());
    } else {
      choose(k, std::integral_constant<int, 1>());
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
    ForTaps(args.weight.dim(1), packed, !args.documents.empty(),
            [&](auto k, auto n, auto documents) {
              const Problem<T> p = Describe<T>(cuda, args, n());
              ForwardKernel<T, k(), n(), documents()>
                  <<<Blocks(p, n()), kThreads, 0, cuda.handle()>>>(p);
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
    ForTaps(forward.weight.dim(1), packed, !forward.documents.empty(),
            [&](auto k, auto n, auto documents) {
              Problem<T> p = Describe<T>(cuda, forward, n());
              p.dy = RowsOf<T>(args.dy);
              p.dx = RowsOf<T>(args.dx);
              p.d_halo = RowsOf<float>(args.d_halo);
              const bool aliased = args.dy.data() == args.dx.data();
              const int64_t rows = p.samples * p.runs;
              const int64_t weights = rows * p.width * k();
              const int64_t heads = aliased ? rows * (k() - 1) * p.width : 0;
              auto* const scratch = static_cast<float*>(cuda.Scratch(
                  (weights + rows * p.width) * 4 + heads * static_cast<int64_t>(sizeof(T))));
              if (scratch == nullptr) return;
              p.weight_sums = scratch;
              p.bias_sums = scratch + weights;
              if (aliased) {
                p.heads = reinterpret_cast<T*>(p.bias_sums + rows * p.width);
                KeepHeadsKernel<T, k(), n()><<<Blocks(p, n()), kThreads, 0, cuda.handle()>>>(p);
              }
              BackwardKernel<T, k(), n(), documents()>
                  <<<Blocks(p, n()), kThreads, 0, cuda.handle()>>>(p);
              AddPartials(cuda, p.weight_sums, rows, p.width * k(), true, args.dweight.f32(),
                          nullptr);
              AddPartials(cuda, p.bias_sums, rows, p.width, true, args.dbias.f32(), nullptr);
            });
  });
  cuda.CheckLaunch("CausalConvBackward");
}

}  // namespace muster::kernels::cuda
