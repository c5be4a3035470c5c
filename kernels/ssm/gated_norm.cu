// Gated RMS norm. A block takes rows of one group one after the other; each thread keeps its
// columns of a row in registers, and those of gamma and of its gradient for all rows. Bytes:
// forward [T,2W] in, [T,W] out; backward [T,3W] in, [T,2W] or [T,3W] out, and a partial sum of
// gamma's gradient for each block.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cuda {
namespace {

// A thread's packs of columns, and the threads of a block that may have so many.
constexpr int kPacksMax = 16;
constexpr int ThreadsMax(int packs) { return packs == 1 ? 640 : packs <= 4 ? 512 : 1024; }

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
  Rows<float> sums;             // of all ranks, or null
  int64_t rows, groups, width;  // width of a group
  float whole_width;            // of a group on all ranks
  float epsilon;

  Rows<T> dout, dy, dz;  // backward writes `out` in one of its kernels only
  float* gamma_sums;     // [blocks of a group, groups * width]
};

__device__ inline float Sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }

// kGateBehind: out = norm(y) gamma silu(z). kShared: p.sums are given; as a branch at run time this
// costs the kernels registers that they lack.

// A thread's columns of a group: pack i starts at column (i threads + thread) N.
template <typename T, int N, int kPacks>
struct Columns {
  const Problem<T>& p;
  int64_t begin;  // of the group
  int turn = 0;   // of the shared memory of sums

  __device__ explicit Columns(const Problem<T>& p) : p(p), begin(blockIdx.y * p.width) {}
  __device__ int64_t At(int i) const {
    return (static_cast<int64_t>(i) * blockDim.x + threadIdx.x) * N;
  }
  __device__ bool Inside(int i) const { return At(i) < p.width; }
  // Zeros outside.
  __device__ void Load(const Rows<T>& from, int64_t t, Pack<T, N> (&packs)[kPacks]) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      packs[i] = Inside(i) ? LoadPack<N>(from.At(t, begin + At(i))) : Pack<T, N>{};
    }
  }
  __device__ void LoadGamma(float (&gamma)[kPacks][N]) const {
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) gamma[i][j] = Inside(i) ? p.gamma[begin + At(i) + j] : 0;
    }
  }
  __device__ float Sum(float sum) {
    __shared__ float shared[2][32];
    turn ^= 1;
    return BlockSum(sum, shared[turn]);
  }
  // The mean over the group's columns of a row, `sum` being this thread's.
  template <bool kShared>
  __device__ float Mean(float sum, int64_t t) {
    if constexpr (kShared) return *p.sums.At(t, blockIdx.y) / p.whole_width;
    return Sum(sum) / static_cast<float>(p.width);
  }
};

template <typename T, int N, int kPacks, bool kGateBehind, bool kShared>
__global__ void __launch_bounds__(ThreadsMax(kPacks)) ForwardKernel(const Problem<T> p) {
  Columns<T, N, kPacks> columns(p);
  float gamma[kPacks][N];
  columns.LoadGamma(gamma);
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x) {
    Pack<T, N> ys[kPacks], zs[kPacks];
    columns.Load(p.y, t, ys);
    columns.Load(p.z, t, zs);
    float values[kPacks][N], squares = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float z = zs[i][j];
        values[i][j] = kGateBehind ? ys[i][j] : ys[i][j] * z * Sigmoid(z);
        squares += values[i][j] * values[i][j];
      }
    }
    const float rstd = 1.0f / sqrtf(columns.template Mean<kShared>(squares, t) + p.epsilon);
    if (threadIdx.x == 0) p.rstd[t * p.groups + blockIdx.y] = rstd;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!columns.Inside(i)) continue;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        values[i][j] *= rstd * gamma[i][j];
        if constexpr (kGateBehind) values[i][j] *= zs[i][j] * Sigmoid(zs[i][j]);
      }
      StorePack<N>(p.out.At(t, columns.begin + columns.At(i)), FromFloats<T>(values[i]));
    }
  }
}

// kOut: writes p.out, forward's output.
template <typename T, int N, int kPacks, bool kGateBehind, bool kShared, bool kOut = false>
__global__ void __launch_bounds__(ThreadsMax(kPacks)) BackwardKernel(const Problem<T> p) {
  Columns<T, N, kPacks> columns(p);
  float gamma[kPacks][N], sums[kPacks][N] = {};
  columns.LoadGamma(gamma);
  // With one pack a thread has registers for the next row, which is then loaded a row ahead.
  constexpr bool kAhead = kPacks == 1;
  Pack<T, N> ys[kPacks], zs[kPacks], douts[kPacks];
  Pack<T, N> next_ys[kPacks], next_zs[kPacks], next_douts[kPacks];
  const auto load = [&](int64_t t) {
    if (t >= p.rows) return;
    columns.Load(p.y, t, next_ys);
    columns.Load(p.z, t, next_zs);
    columns.Load(p.dout, t, next_douts);
  };
  if constexpr (kAhead) load(blockIdx.x);
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x) {
    if constexpr (!kAhead) load(t);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      ys[i] = next_ys[i];
      zs[i] = next_zs[i];
      douts[i] = next_douts[i];
    }
    if constexpr (kAhead) load(t + gridDim.x);
    const float rstd = p.rstd[t * p.groups + blockIdx.y];
    float sigmoids[kPacks][N], dot = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        sigmoids[i][j] = Sigmoid(zs[i][j]);
        // Either way silu(z) is a factor of it.
        const float own = douts[i][j] * ys[i][j] * zs[i][j] * sigmoids[i][j];
        sums[i][j] += own * rstd;
        dot += own * gamma[i][j];
      }
    }
    const float factor = rstd * rstd * columns.template Mean<kShared>(dot, t);
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      if (!columns.Inside(i)) continue;
      float dy[N], dz[N], out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float y = ys[i][j], z = zs[i][j], s = sigmoids[i][j];
        const float silu = z * s, d_silu = s * (1 + z * (1 - s));
        const float scaled = douts[i][j] * gamma[i][j];
        if constexpr (kGateBehind) {
          dy[j] = rstd * (scaled * silu - y * factor);
          dz[j] = scaled * rstd * y * d_silu;
        } else {
          const float d = rstd * (scaled - y * silu * factor);
          dy[j] = d * silu;
          dz[j] = d * y * d_silu;
          out[j] = y * silu * rstd * gamma[i][j];
        }
      }
      StorePack<N>(p.dy.At(t, columns.begin + columns.At(i)), FromFloats<T>(dy));
      StorePack<N>(p.dz.At(t, columns.begin + columns.At(i)), FromFloats<T>(dz));
      if constexpr (kOut) {
        StorePack<N>(p.out.At(t, columns.begin + columns.At(i)), FromFloats<T>(out));
      }
    }
  }
  float* const to = p.gamma_sums + blockIdx.x * p.groups * p.width + columns.begin;
#pragma unroll
  for (int i = 0; i < kPacks; ++i) {
    if (!columns.Inside(i)) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) to[columns.At(i) + j] = sums[i][j];
  }
}

// The gate is in front of the norm. Writes p.out without the norm's factor, and p.sums.
template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(ThreadsMax(kPacks)) UnscaledKernel(const Problem<T> p) {
  Columns<T, N, kPacks> columns(p);
  float gamma[kPacks][N];
  columns.LoadGamma(gamma);
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x) {
    Pack<T, N> ys[kPacks], zs[kPacks];
    columns.Load(p.y, t, ys);
    columns.Load(p.z, t, zs);
    float squares = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
      float out[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float z = zs[i][j], value = ys[i][j] * z * Sigmoid(z);
        squares += value * value;
        out[j] = value * gamma[i][j];
      }
      if (columns.Inside(i)) {
        StorePack<N>(p.out.At(t, columns.begin + columns.At(i)), FromFloats<T>(out));
      }
    }
    squares = columns.Sum(squares);
    if (threadIdx.x == 0) *p.sums.At(t, blockIdx.y) = squares;
  }
}

// p.sums of each row: p.dout times p.out.
template <typename T, int N, int kPacks>
__global__ void __launch_bounds__(ThreadsMax(kPacks)) DotsKernel(const Problem<T> p) {
  Columns<T, N, kPacks> columns(p);
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x) {
    Pack<T, N> douts[kPacks], outs[kPacks];
    columns.Load(p.dout, t, douts);
    columns.Load(p.out, t, outs);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) sum += static_cast<float>(douts[i][j]) * outs[i][j];
    }
    sum = columns.Sum(sum);
    if (threadIdx.x == 0) *p.sums.At(t, blockIdx.y) = sum;
  }
}

template <typename T>
struct ScaleProblem {
  const float* sums;
  float* rstd;
  int64_t all;  // rows of sums
  float width, epsilon;
  T* rows;
  int64_t count, columns, first;

  __device__ float Factor(int64_t t) const { return 1.0f / sqrtf(sums[t] / width + epsilon); }
};

template <typename T, int N>
__global__ void ScaleRowsKernel(const ScaleProblem<T> p) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t t = thread; t < p.all; t += threads) p.rstd[t] = p.Factor(t);
  const int64_t of_row = p.columns / N;
  for (int64_t i = thread; i < p.count * of_row; i += threads) {
    const float factor = p.Factor(p.first + i / of_row);
    const Pack<T, N> pack = LoadPack<N>(p.rows + i * N);
    float scaled[N];
#pragma unroll
    for (int j = 0; j < N; ++j) scaled[j] = pack[j] * factor;
    StorePack<N>(p.rows + i * N, FromFloats<T>(scaled));
  }
}

// p.sums of each row: squares of what the norm reads, or, backward, that times the gradient.
template <typename T, int N, int kPacks, bool kGateBehind, bool kBackward>
__global__ void __launch_bounds__(ThreadsMax(kPacks)) SumsKernel(const Problem<T> p) {
  Columns<T, N, kPacks> columns(p);
  for (int64_t t = blockIdx.x; t < p.rows; t += gridDim.x) {
    Pack<T, N> ys[kPacks], zs[kPacks], douts[kPacks];
    columns.Load(p.y, t, ys);
    columns.Load(p.z, t, zs);
    if constexpr (kBackward) columns.Load(p.dout, t, douts);
    float sum = 0;
#pragma unroll
    for (int i = 0; i < kPacks; ++i) {
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float z = zs[i][j];
        if constexpr (kBackward) {
          const float gamma = columns.Inside(i) ? p.gamma[columns.begin + columns.At(i) + j] : 0;
          sum += douts[i][j] * ys[i][j] * z * Sigmoid(z) * gamma;
        } else {
          const float value = kGateBehind ? ys[i][j] : ys[i][j] * z * Sigmoid(z);
          sum += value * value;
        }
      }
    }
    sum = columns.Sum(sum);
    if (threadIdx.x == 0) *p.sums.At(t, blockIdx.y) = sum;
  }
}

template <typename T>
Problem<T> Describe(const GatedRmsNormArgs& args) {
  Problem<T> p{};
  p.y = RowsOf<T>(args.y);
  p.z = RowsOf<T>(args.z);
  p.out = RowsOf<T>(args.out);
  p.gamma = args.gamma.f32();
  if (!args.rstd.empty()) p.rstd = args.rstd.f32();
  p.sums = RowsOf<float>(args.sums);
  p.rows = args.y.dim(0);
  p.groups = args.groups;
  p.width = args.y.dim(1) / args.groups;
  p.whole_width = static_cast<float>(args.sums.empty() ? p.width : args.group_width);
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

// Calls launch(elements of a pack and packs of a thread, as constants, and threads).
template <typename T, typename Launch>
void ForPacks(bool packed, int64_t width, Launch launch) {
  const auto with = [&](auto n, auto packs) {
    const int64_t threads = CeilDiv(CeilDiv(width, int64_t{n()} * packs()), kWarp) * kWarp;
    if (threads > ThreadsMax(packs())) return false;
    launch(n, packs, static_cast<unsigned>(threads));
    return true;
  };
  using std::integral_constant;
  if (packed) {
    const auto n = integral_constant<int, kPackSize<T>>();
    if (with(n, integral_constant<int, 1>()) || with(n, integral_constant<int, 2>()) ||
        with(n, integral_constant<int, 4>())) {
      return;
    }
  }
  const auto n = integral_constant<int, 1>();
  const bool fits =
      with(n, integral_constant<int, 4>()) || with(n, integral_constant<int, kPacksMax>());
  CHECK(fits) << "columns of a group of the norm: " << width;
}

// The kernel for the order of gate and norm and for sums that are given or not.
template <typename KernelOf>
auto Choose(const GatedRmsNormArgs& args, KernelOf kernel_of) {
  const std::true_type yes;
  const std::false_type no;
  if (args.norm_before_gate) return args.sums.empty() ? kernel_of(yes, no) : kernel_of(yes, yes);
  return args.sums.empty() ? kernel_of(no, no) : kernel_of(no, yes);
}

// As many blocks as run at a time, so that each takes equally many rows.
template <typename Kernel>
unsigned BlocksOfGroup(CudaStream& stream, Kernel kernel, unsigned threads, int64_t rows,
                       int64_t groups) {
  int of_multiprocessor = 1;
  stream.Check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&of_multiprocessor, kernel,
                                                             static_cast<int>(threads), 0),
               "GatedRmsNorm");
  const int64_t blocks = int64_t{stream.cuda_device().multiprocessors()} * of_multiprocessor;
  return static_cast<unsigned>(std::min(rows, CeilDiv(blocks, groups)));
}

// A kernel that takes the problem alone.
template <typename T, typename Kernel>
void Launch(CudaStream& cuda, const Problem<T>& p, Kernel kernel, unsigned threads) {
  const dim3 grid(BlocksOfGroup(cuda, kernel, threads, p.rows, p.groups),
                  static_cast<unsigned>(p.groups));
  kernel<<<grid, threads, 0, cuda.handle()>>>(p);
}

template <typename T, bool kBackward>
void WriteSums(CudaStream& cuda, const Problem<T>& p, bool packed, bool gate_behind) {
  ForPacks<T>(packed, p.width, [&](auto n, auto packs, unsigned threads) {
    const auto kernel = gate_behind ? SumsKernel<T, n(), packs(), true, kBackward>
                                    : SumsKernel<T, n(), packs(), false, kBackward>;
    Launch(cuda, p, kernel, threads);
  });
}

}  // namespace

void GatedRmsNormForward(Stream& stream, const GatedRmsNormArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.y.elements() == 0) return;
  DispatchFloat(args.y.dtype(), [&](auto tag) {
    using T = decltype(tag);
    const Problem<T> p = Describe<T>(args);
    const bool packed = Packs<T>({&args.y, &args.z, &args.out}, p.width);
    ForPacks<T>(packed, p.width, [&](auto n, auto packs, unsigned threads) {
      const auto kernel = Choose(args, [&](auto behind, auto shared) {
        return ForwardKernel<T, n(), packs(), behind(), shared()>;
      });
      Launch(cuda, p, kernel, threads);
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
    p.out = RowsOf<T>(args.out);
    const bool packed =
        Packs<T>({&args.forward.y, &args.forward.z, &args.dout, &args.dy, &args.dz}, p.width) &&
        (args.out.empty() || Packs<T>({&args.out}, p.width));
    ForPacks<T>(packed, p.width, [&](auto n, auto packs, unsigned threads) {
      const auto kernel = args.out.empty()
                              ? Choose(args.forward,
                                       [&](auto behind, auto shared) {
                                         return BackwardKernel<T, n(), packs(), behind(), shared()>;
                                       })
                              : BackwardKernel<T, n(), packs(), false, true, true>;
      const unsigned blocks = BlocksOfGroup(cuda, kernel, threads, p.rows, p.groups);
      p.gamma_sums = static_cast<float*>(cuda.Scratch(int64_t{blocks} * p.groups * p.width * 4));
      if (p.gamma_sums == nullptr) return;
      const dim3 grid(blocks, static_cast<unsigned>(p.groups));
      kernel<<<grid, threads, 0, cuda.handle()>>>(p);
      AddPartials(cuda, p.gamma_sums, blocks, p.groups * p.width, true, args.dgamma.f32(), nullptr);
    });
  });
  cuda.CheckLaunch("GatedRmsNormBackward");
}

void GatedRmsNormSums(Stream& stream, const GatedRmsNormArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.y.elements() == 0) return;
  DispatchFloat(args.y.dtype(), [&](auto tag) {
    using T = decltype(tag);
    const Problem<T> p = Describe<T>(args);
    WriteSums<T, false>(cuda, p, Packs<T>({&args.y, &args.z}, p.width), args.norm_before_gate);
  });
  cuda.CheckLaunch("GatedRmsNormSums");
}

void GatedRmsNormUnscaled(Stream& stream, const GatedRmsNormArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.y.elements() == 0) return;
  DispatchFloat(args.y.dtype(), [&](auto tag) {
    using T = decltype(tag);
    const Problem<T> p = Describe<T>(args);
    ForPacks<T>(Packs<T>({&args.y, &args.z, &args.out}, p.width), p.width,
                [&](auto n, auto packs, unsigned threads) {
                  const auto kernel = UnscaledKernel<T, n(), packs()>;
                  Launch(cuda, p, kernel, threads);
                });
  });
  cuda.CheckLaunch("GatedRmsNormUnscaled");
}

void RmsScaleRows(Stream& stream, const RmsScaleRowsArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.sums.dim(0) == 0) return;
  constexpr unsigned kThreads = 256;
  // Few enough to run at a time beside others, enough for the memory's speed.
  const auto blocks = static_cast<unsigned>(4 * cuda.cuda_device().multiprocessors());
  DispatchFloat(args.rows.empty() ? DType::kF32 : args.rows.dtype(), [&](auto tag) {
    using T = decltype(tag);
    ScaleProblem<T> p{};
    p.sums = args.sums.f32();
    p.rstd = args.rstd.f32();
    p.all = args.sums.dim(0);
    p.width = static_cast<float>(args.width);
    p.epsilon = args.epsilon;
    if (!args.rows.empty()) {
      p.rows = args.rows.as<T>();
      p.count = args.rows.dim(0);
      p.columns = args.rows.dim(1);
      p.first = args.first;
    }
    const bool packed = Aligned16(args.rows) && p.columns % kPackSize<T> == 0;
    const auto kernel = packed ? ScaleRowsKernel<T, kPackSize<T>> : ScaleRowsKernel<T, 1>;
    kernel<<<blocks, kThreads, 0, cuda.handle()>>>(p);
  });
  cuda.CheckLaunch("RmsScaleRows");
}

void GatedRmsNormBackwardSums(Stream& stream, const GatedRmsNormBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  const GatedRmsNormArgs& forward = args.forward;
  if (args.dout.elements() == 0) return;
  DispatchFloat(args.dout.dtype(), [&](auto tag) {
    using T = decltype(tag);
    Problem<T> p = Describe<T>(forward);
    p.dout = RowsOf<T>(args.dout);
    if (!args.out.empty()) {
      p.out = RowsOf<T>(args.out);
      ForPacks<T>(Packs<T>({&args.dout, &args.out}, p.width), p.width,
                  [&](auto n, auto packs, unsigned threads) {
                    const auto kernel = DotsKernel<T, n(), packs()>;
                    Launch(cuda, p, kernel, threads);
                  });
      return;
    }
    WriteSums<T, true>(cuda, p, Packs<T>({&forward.y, &forward.z, &args.dout}, p.width),
                       forward.norm_before_gate);
  });
  cuda.CheckLaunch("GatedRmsNormBackwardSums");
}

}  // namespace muster::kernels::cuda
