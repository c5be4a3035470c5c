// The state-space scan for every shape, dtype and device, as its recurrence in fp32. A warp holds
// some rows of a state (or of its gradient) in registers, the other dimension across its lanes.
// ssd_hopper.h has faster kernels for what is trained: 16-bit tensors with rows of whole 16 bytes.
//
// With G_t the gradient of state_t, and G behind a chunk stored by a scan from the end:
//   dx, ddt: rows of the state by warp; one pass over a chunk each way.
//   dB, dC:  columns of the state by warp, over all heads of a group, whose sums stay in the block.
// For d(step_t A) = <G_t, exp(step_t A) state_{t-1}> both states would have to be at hand. With
// row_t = <dy_t, state_t C_t> and column_t = step_t <x_t, G_t B_t>,
//   d(step_t A) = d(step_{t+1} A) + row_t - column_t
// within a document, which starts from <G, state> behind the chunk.
#include <algorithm>
#include <type_traits>

#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/device/device_cuda.h"
#include "kernels/ssm/ssd_hopper.h"
#include "kernels/ssm/ssd_problem.cuh"
#include "kernels/ssm/ssd_segments.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kRows = 4;  // of a warp
constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kSlice = kWarps * kRows;  // rows of a block
constexpr int64_t kChunkMax = 1024;

template <typename T>
struct Scan {
  SsdProblem<T> p;
  float* sizes;   // [B,H,S]
  float* decays;  // [B,H,S]; 0 where a document begins
  void* states;   // [B,chunks,H,P,N], in front of chunks: T or fp32; or null
  bool states_are_fp32;
  void* exits;  // as states: the gradient of the state behind a chunk
  bool exits_are_fp32;
  float* partials;  // [B * chunks, 3, H]: of dt_bias, a_log and d

  __device__ int64_t Steps(int64_t b, int64_t h) const { return (b * p.heads + h) * p.positions; }
  __device__ int64_t State(int64_t b, int64_t chunk, int64_t h) const {
    return ((b * p.chunks + chunk) * p.heads + h) * p.width * p.columns;
  }
  __device__ static float Read(const void* from, bool fp32, int64_t i) {
    return fp32 ? static_cast<const float*>(from)[i] : ToFloat(static_cast<const T*>(from)[i]);
  }
  __device__ static void Write(void* to, bool fp32, int64_t i, float value) {
    if (fp32) {
      static_cast<float*>(to)[i] = value;
    } else {
      static_cast<T*>(to)[i] = FromFloat<T>(value);
    }
  }
  __device__ float ReadState(int64_t i) const { return Read(states, states_are_fp32, i); }
  __device__ void WriteState(int64_t i, float value) const {
    Write(states, states_are_fp32, i, value);
  }
  __device__ float ReadExit(int64_t i) const { return Read(exits, exits_are_fp32, i); }
  __device__ void WriteExit(int64_t i, float value) const {
    Write(exits, exits_are_fp32, i, value);
  }
};

template <typename T>
__global__ void __launch_bounds__(256) StepsKernel(const Scan<T> s) {
  const SsdProblem<T>& p = s.p;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= p.samples * p.positions * p.heads) return;
  const int64_t h = i % p.heads, t = i / p.heads % p.positions, b = i / p.heads / p.positions;
  const SsdStep step(p, b, t, h);
  const float a = -expf(p.a_log[h]);
  s.sizes[s.Steps(b, h) + t] = step.size;
  s.decays[s.Steps(b, h) + t] = p.BeginsDocument(b, t) ? 0.0f : expf(step.size * a);
}

// kRows rows of a matrix, column lane + 32 j in registers. Rows and columns beyond it are zero.
template <int kColumns>
struct Tile {
  float at[kRows][kColumns];

  __device__ void Clear() {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) at[r][j] = 0;
    }
  }
  // Calls f(row, column, element) for those inside.
  template <typename F>
  __device__ void ForEach(int64_t row, int64_t rows, int64_t columns, F f) {
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const int64_t column = lane + j * kWarp;
        if (row + r < rows && column < columns) f(row + r, column, at[r][j]);
      }
    }
  }
  // at = decay at + u (outer) v.
  __device__ void Advance(float decay, const float (&u)[kRows], const float (&v)[kColumns]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) at[r][j] = decay * at[r][j] + u[r] * v[j];
    }
  }
  __device__ void Scale(float factor) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
#pragma unroll
      for (int j = 0; j < kColumns; ++j) at[r][j] *= factor;
    }
  }
  // This lane's part of at v.
  __device__ void Multiply(const float (&v)[kColumns], float (&out)[kRows]) const {
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      out[r] = 0;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) out[r] += at[r][j] * v[j];
    }
  }
};

template <typename T>
__device__ void LoadRows(const T* from, int64_t row, int64_t rows, float (&out)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) out[r] = row + r < rows ? ToFloat(from[row + r]) : 0;
}
template <int kColumns, typename T>
__device__ void LoadColumns(const T* from, int64_t columns, float (&out)[kColumns]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int j = 0; j < kColumns; ++j) {
    const int64_t column = lane + j * kWarp;
    out[j] = column < columns ? ToFloat(from[column]) : 0;
  }
}
__device__ inline void SumRows(float (&rows)[kRows]) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] = WarpSum(rows[r]);
}
__device__ inline void ScaleRows(float (&rows)[kRows], float factor) {
#pragma unroll
  for (int r = 0; r < kRows; ++r) rows[r] *= factor;
}

// The rows of one state that a warp scans: block = (sample, head, slice of the rows).
template <typename T>
struct ScanPlace {
  int64_t b, h, group, row;

  __device__ ScanPlace(const SsdProblem<T>& p, int64_t block) {
    const int64_t slices = (p.width + kSlice - 1) / kSlice;
    row = block % slices * kSlice + threadIdx.x / kWarp * kRows;
    h = block / slices % p.heads;
    b = block / slices / p.heads;
    group = h / p.heads_of_group();
  }
};

// Advances the state through a chunk; with kOutputs also writes y.
template <bool kOutputs, typename T, int kColumns>
__device__ void ScanChunk(const Scan<T>& s, const ScanPlace<T>& at, int64_t chunk,
                          Tile<kColumns>& state) {
  const SsdProblem<T>& p = s.p;
  const float* const sizes = s.sizes + s.Steps(at.b, at.h);
  const float* const decays = s.decays + s.Steps(at.b, at.h);
  const float d = p.d[at.h];
  const int64_t end = min(p.positions, (chunk + 1) * p.chunk);
#pragma unroll 4
  for (int64_t t = chunk * p.chunk; t < end; ++t) {
    float x[kRows], input[kRows], b[kColumns];
    LoadRows(p.x.At(at.b, t, at.h), at.row, p.width, x);
    LoadColumns<kColumns>(p.b.At(at.b, t, at.group), p.columns, b);
#pragma unroll
    for (int r = 0; r < kRows; ++r) input[r] = sizes[t] * x[r];
    state.Advance(decays[t], input, b);
    if constexpr (kOutputs) {
      float y[kRows], c[kColumns];
      LoadColumns<kColumns>(p.c.At(at.b, t, at.group), p.columns, c);
      state.Multiply(c, y);
      SumRows(y);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (threadIdx.x % kWarp == r && at.row + r < p.width) {
          p.y.At(at.b, t, at.h)[at.row + r] = FromFloat<T>(y[r] + d * x[r]);
        }
      }
    }
  }
}

template <bool kOutputs, typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) ForwardKernel(const Scan<T> s) {
  const SsdProblem<T>& p = s.p;
  const ScanPlace<T> at(p, blockIdx.x);
  Tile<kColumns> state;
  state.Clear();
  const int64_t own = (at.b * p.heads + at.h) * p.width * p.columns;
  if (p.initial != nullptr) {
    state.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      value = p.initial[own + i * p.columns + j];
    });
  }
  for (int64_t chunk = 0; chunk < p.chunks; ++chunk) {
    if (s.states != nullptr) {
      const int64_t to = s.State(at.b, chunk, at.h);
      state.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
        s.WriteState(to + i * p.columns + j, value);
      });
    }
    ScanChunk<kOutputs>(s, at, chunk, state);
  }
  if (p.final_state != nullptr) {
    state.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      p.final_state[own + i * p.columns + j] = value;
    });
  }
}

// y of a chunk from the state stored in front of it: block = (place of a scan, chunk).
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) OutputsKernel(const Scan<T> s) {
  const SsdProblem<T>& p = s.p;
  const ScanPlace<T> at(p, blockIdx.x / p.chunks);
  const int64_t chunk = blockIdx.x % p.chunks, from = s.State(at.b, chunk, at.h);
  Tile<kColumns> state;
  state.Clear();
  state.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
    value = s.ReadState(from + i * p.columns + j);
  });
  ScanChunk<true>(s, at, chunk, state);
}

// The gradients of the states behind chunks.
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) ExitsKernel(const Scan<T> s) {
  const SsdProblem<T>& p = s.p;
  const ScanPlace<T> at(p, blockIdx.x);
  Tile<kColumns> gradient;
  gradient.Clear();
  const int64_t own = (at.b * p.heads + at.h) * p.width * p.columns;
  if (p.d_final != nullptr) {
    gradient.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      value = p.d_final[own + i * p.columns + j];
    });
  }
  const float* const decays = s.decays + s.Steps(at.b, at.h);
  for (int64_t chunk = p.chunks - 1; chunk >= 0; --chunk) {
    const int64_t to = s.State(at.b, chunk, at.h);
    gradient.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      s.WriteExit(to + i * p.columns + j, value);
    });
    const int64_t begin = chunk * p.chunk;
#pragma unroll 4
    for (int64_t t = min(p.positions, begin + p.chunk) - 1; t >= begin; --t) {
      float dy[kRows], c[kColumns];
      LoadRows(p.dy.At(at.b, t, at.h), at.row, p.width, dy);
      LoadColumns<kColumns>(p.c.At(at.b, t, at.group), p.columns, c);
      gradient.Advance(1, dy, c);
      gradient.Scale(decays[t]);
    }
  }
  if (p.d_initial != nullptr) {
    gradient.ForEach(at.row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      p.d_initial[own + i * p.columns + j] = value;
    });
  }
}

// dx and ddt of a chunk of a head: block = (sample, chunk, head). A warp takes every fourth slice
// of the rows. Shared memory: [2, kWarps, chunk].
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) InputGradientKernel(const Scan<T> s) {
  extern __shared__ float shared[];
  __shared__ float sums[32];
  const SsdProblem<T>& p = s.p;
  const int64_t h = blockIdx.x % p.heads, chunk = blockIdx.x / p.heads % p.chunks;
  const int64_t b = blockIdx.x / p.heads / p.chunks, group = h / p.heads_of_group();
  const int64_t begin = chunk * p.chunk, end = min(p.positions, begin + p.chunk);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  // By position: row_t, and <x_t, G_t B_t>.
  float* const rows = shared + warp * p.chunk;
  float* const inner = rows + kWarps * p.chunk;
  for (int64_t i = lane; i < p.chunk; i += kWarp) rows[i] = inner[i] = 0;
  __syncwarp();
  const float* const sizes = s.sizes + s.Steps(b, h);
  const float* const decays = s.decays + s.Steps(b, h);
  const float d = p.d[h];
  const int64_t from = s.State(b, chunk, h);
  float behind = 0, d_skip = 0;  // <G, state> behind the chunk; <dy, x>
  for (int64_t row = warp * kRows; row < p.width; row += kSlice) {
    Tile<kColumns> tile;
    tile.Clear();
    tile.ForEach(row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      value = s.ReadState(from + i * p.columns + j);
    });
#pragma unroll 4
    for (int64_t t = begin; t < end; ++t) {
      float x[kRows], dy[kRows], y[kRows], bs[kColumns], cs[kColumns];
      LoadRows(p.x.At(b, t, h), row, p.width, x);
      LoadRows(p.dy.At(b, t, h), row, p.width, dy);
      LoadColumns<kColumns>(p.b.At(b, t, group), p.columns, bs);
      LoadColumns<kColumns>(p.c.At(b, t, group), p.columns, cs);
#pragma unroll
      for (int r = 0; r < kRows; ++r) d_skip += lane == 0 ? dy[r] * x[r] : 0;
      ScaleRows(x, sizes[t]);
      tile.Advance(decays[t], x, bs);
      tile.Multiply(cs, y);
      float own = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) own += dy[r] * y[r];
      own = WarpSum(own);
      if (lane == 0) rows[t - begin] += own;
    }
    tile.ForEach(row, p.width, p.columns, [&](int64_t i, int64_t j, float& value) {
      const float exit = s.ReadExit(from + i * p.columns + j);
      behind += value * exit;
      value = exit;
    });
#pragma unroll 4
    for (int64_t t = end - 1; t >= begin; --t) {
      float x[kRows], dy[kRows], gb[kRows], bs[kColumns], cs[kColumns];
      LoadRows(p.x.At(b, t, h), row, p.width, x);
      LoadRows(p.dy.At(b, t, h), row, p.width, dy);
      LoadColumns<kColumns>(p.b.At(b, t, group), p.columns, bs);
      LoadColumns<kColumns>(p.c.At(b, t, group), p.columns, cs);
      tile.Advance(1, dy, cs);
      tile.Multiply(bs, gb);
      SumRows(gb);
      float own = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        own += x[r] * gb[r];
        if (lane == r && row + r < p.width) {
          p.dx.At(b, t, h)[row + r] = FromFloat<T>(sizes[t] * gb[r] + d * dy[r]);
        }
      }
      if (lane == 0) inner[t - begin] += own;
      tile.Scale(decays[t]);
    }
  }
  d_skip = BlockSum(d_skip, sums);
  __syncthreads();
  behind = BlockSum(behind, sums);  // its barrier makes `rows` and `inner` of all warps visible
  if (threadIdx.x != 0) return;
  const float a = -expf(p.a_log[h]);
  float d_exponent = behind, a_sum = 0, bias_sum = 0;
  for (int64_t t = end - 1; t >= begin; --t) {
    float row = 0, d_size = 0;
    for (int w = 0; w < kWarps; ++w) {
      row += shared[w * p.chunk + t - begin];
      d_size += shared[(kWarps + w) * p.chunk + t - begin];
    }
    d_exponent = decays[t] == 0 ? 0 : d_exponent + row - sizes[t] * d_size;
    const float ddt = (d_size + a * d_exponent) * SsdStep(p, b, t, h).slope;
    a_sum += sizes[t] * d_exponent;
    bias_sum += ddt;
    *p.ddt.At(b, t, h) = FromFloat<T>(ddt);
  }
  float* const to = s.partials + (b * p.chunks + chunk) * 3 * p.heads + h;
  to[0] = bias_sum;
  to[p.heads] = a_sum * a;  // dA / da_log = A
  to[2 * p.heads] = d_skip;
}

// dB and dC of a chunk of a group: block = (sample, chunk, group, slice of the columns). States are
// transposed here: a warp holds columns of the state, and its lanes are its rows. Shared memory:
// [2, chunk, kSlice].
template <typename T, int kColumns>
__global__ void __launch_bounds__(kThreads) GroupGradientKernel(const Scan<T> s) {
  extern __shared__ float shared[];
  const SsdProblem<T>& p = s.p;
  const int64_t slices = (p.columns + kSlice - 1) / kSlice;
  const int own = threadIdx.x / kWarp * kRows, lane = threadIdx.x % kWarp;
  const int64_t row = blockIdx.x % slices * kSlice + own;
  const int64_t group = blockIdx.x / slices % p.groups;
  const int64_t chunk = blockIdx.x / slices / p.groups % p.chunks;
  const int64_t b = blockIdx.x / slices / p.groups / p.chunks;
  const int64_t begin = chunk * p.chunk, end = min(p.positions, begin + p.chunk);
  float* const dc = shared + own;
  float* const db = dc + p.chunk * kSlice;
  if (lane < kRows) {
    for (int64_t i = 0; i < p.chunk; ++i) dc[i * kSlice + lane] = db[i * kSlice + lane] = 0;
  }
  __syncwarp();
  for (int64_t h = group * p.heads_of_group(); h < (group + 1) * p.heads_of_group(); ++h) {
    const float* const sizes = s.sizes + s.Steps(b, h);
    const float* const decays = s.decays + s.Steps(b, h);
    const int64_t from = s.State(b, chunk, h);
    Tile<kColumns> tile;
    tile.Clear();
    tile.ForEach(row, p.columns, p.width, [&](int64_t i, int64_t j, float& value) {
      value = s.ReadState(from + j * p.columns + i);
    });
    const auto add = [&](float* to, int64_t t, float(&values)[kRows]) {
      SumRows(values);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        if (lane == r) to[(t - begin) * kSlice + r] += values[r];
      }
    };
#pragma unroll 4
    for (int64_t t = begin; t < end; ++t) {
      float x[kColumns], dy[kColumns], bs[kRows], out[kRows];
      LoadColumns<kColumns>(p.x.At(b, t, h), p.width, x);
      LoadColumns<kColumns>(p.dy.At(b, t, h), p.width, dy);
      LoadRows(p.b.At(b, t, group), row, p.columns, bs);
      ScaleRows(bs, sizes[t]);
      tile.Advance(decays[t], bs, x);
      tile.Multiply(dy, out);
      add(dc, t, out);
    }
    tile.ForEach(row, p.columns, p.width, [&](int64_t i, int64_t j, float& value) {
      value = s.ReadExit(from + j * p.columns + i);
    });
#pragma unroll 4
    for (int64_t t = end - 1; t >= begin; --t) {
      float x[kColumns], dy[kColumns], cs[kRows], out[kRows];
      LoadColumns<kColumns>(p.x.At(b, t, h), p.width, x);
      LoadColumns<kColumns>(p.dy.At(b, t, h), p.width, dy);
      LoadRows(p.c.At(b, t, group), row, p.columns, cs);
      tile.Advance(1, cs, dy);
      tile.Multiply(x, out);
      ScaleRows(out, sizes[t]);
      add(db, t, out);
      tile.Scale(decays[t]);
    }
  }
  __syncwarp();
  for (int64_t t = begin; t < end; ++t) {
    if (lane >= kRows || row + lane >= p.columns) continue;
    p.dc.At(b, t, group)[row + lane] = FromFloat<T>(dc[(t - begin) * kSlice + lane]);
    p.db.At(b, t, group)[row + lane] = FromFloat<T>(db[(t - begin) * kSlice + lane]);
  }
}

// Calls f(registers of a lane for this many columns, as a constant).
template <typename F>
void ForColumns(int64_t columns, F f) {
  CHECK_LE(columns, 8 * kWarp) << "columns or rows of a state";
  if (columns <= kWarp) return f(std::integral_constant<int, 1>());
  if (columns <= 2 * kWarp) return f(std::integral_constant<int, 2>());
  if (columns <= 4 * kWarp) return f(std::integral_constant<int, 4>());
  f(std::integral_constant<int, 8>());
}

template <typename T>
void LaunchSteps(CudaStream& stream, const Scan<T>& s) {
  const int64_t steps = s.p.samples * s.p.positions * s.p.heads;
  StepsKernel<T><<<static_cast<unsigned>(CeilDiv(steps, 256)), 256, 0, stream.handle()>>>(s);
}

// `kernel` with `bytes` of dynamic shared memory.
template <typename T>
void Launch(CudaStream& stream, void (*kernel)(Scan<T>), int64_t blocks, int64_t bytes,
            const Scan<T>& s) {
  stream.Check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    static_cast<int>(bytes)),
               "Ssd");
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(bytes), stream.handle()>>>(
      s);
}

template <typename T>
Scan<T> DescribeScan(const SsdProblem<T>& p, const Tensor& states, float* scratch) {
  Scan<T> s{};
  s.p = p;
  s.sizes = scratch;
  s.decays = scratch + p.samples * p.positions * p.heads;
  s.states = states.data();
  s.states_are_fp32 = states.empty() || states.dtype() == DType::kF32;
  return s;
}

template <typename T>
void Forward(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  const SsdProblem<T> p = DescribeSsd<T>(args);
  auto* const scratch =
      static_cast<float*>(stream.Scratch(2 * p.samples * p.positions * p.heads * 4));
  if (scratch == nullptr) return;
  const Scan<T> s = DescribeScan<T>(p, args.states, scratch);
  LaunchSteps(stream, s);
  const int64_t blocks = p.samples * p.heads * CeilDiv(p.width, kSlice);
  ForColumns(p.columns, [&](auto columns) {
    if (part == SsdPart::kRest) {
      Launch<T>(stream, OutputsKernel<T, columns()>, blocks * p.chunks, 0, s);
    } else if (part == SsdPart::kStates) {
      Launch<T>(stream, ForwardKernel<false, T, columns()>, blocks, 0, s);
    } else {
      Launch<T>(stream, ForwardKernel<true, T, columns()>, blocks, 0, s);
    }
  });
}

template <typename T>
void Backward(CudaStream& stream, const SsdBackwardArgs& args, SsdPart part) {
  const SsdProblem<T> p = DescribeSsd<T>(args);
  CHECK_LE(p.chunk, kChunkMax) << "positions of a chunk";
  const int64_t steps = p.samples * p.positions * p.heads;
  const int64_t states =
      part == SsdPart::kWhole ? p.samples * p.chunks * p.heads * p.width * p.columns : 0;
  const int64_t partials = p.samples * p.chunks * 3 * p.heads;
  auto* const scratch = static_cast<float*>(stream.Scratch((2 * steps + states + partials) * 4));
  if (scratch == nullptr) return;
  Scan<T> s = DescribeScan<T>(p, args.forward.states, scratch);
  float* const exits = scratch + 2 * steps;
  s.exits = part == SsdPart::kWhole ? exits : args.d_states.data();
  s.exits_are_fp32 = part == SsdPart::kWhole || args.d_states.dtype() == DType::kF32;
  s.partials = exits + states;
  LaunchSteps(stream, s);
  if (part != SsdPart::kRest) {
    ForColumns(p.columns, [&](auto columns) {
      Launch<T>(stream, ExitsKernel<T, columns()>, p.samples * p.heads * CeilDiv(p.width, kSlice),
                0, s);
    });
  }
  if (part == SsdPart::kStates) return;
  ForColumns(p.columns, [&](auto columns) {
    Launch<T>(stream, InputGradientKernel<T, columns()>, p.samples * p.chunks * p.heads,
              2 * kWarps * p.chunk * 4, s);
  });
  ForColumns(p.width, [&](auto columns) {
    Launch<T>(stream, GroupGradientKernel<T, columns()>,
              p.samples * p.chunks * p.groups * CeilDiv(p.columns, kSlice),
              2 * p.chunk * kSlice * 4, s);
  });
  AddPartials(stream, s.partials, p.samples * p.chunks, p.heads, true, args.d_dt_bias.f32(),
              args.d_a_log.f32(), args.dd.f32(), true);
}

void RunForward(CudaStream& stream, const SsdArgs& args, SsdPart part) {
  if (!HopperSsdForward(stream, args, part)) {
    DispatchFloat(args.x.dtype(), [&](auto tag) { Forward<decltype(tag)>(stream, args, part); });
  }
}
void RunBackward(CudaStream& stream, const SsdBackwardArgs& args, SsdPart part) {
  if (!HopperSsdBackward(stream, args, part)) {
    DispatchFloat(args.dy.dtype(), [&](auto tag) { Backward<decltype(tag)>(stream, args, part); });
  }
}

}  // namespace

void SsdForward(Stream& stream, const SsdArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.x.elements() == 0) return;
  RunForward(cuda, args, SsdPart::kWhole);
  cuda.CheckLaunch("SsdForward");
}

void SsdBackward(Stream& stream, const SsdBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.dy.elements() == 0) return;
  RunBackward(cuda, args, SsdPart::kWhole);
  cuda.CheckLaunch("SsdBackward");
}

void SsdForwardStates(Stream& stream, const SsdArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.x.elements() == 0) return;
  SsdArgs from_zero = args;
  from_zero.initial_state = Tensor();
  RunForward(cuda, from_zero, SsdPart::kStates);
  SsdDecays(cuda, args);
  cuda.CheckLaunch("SsdForwardStates");
}

void SsdForwardOutputs(Stream& stream, const SsdArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.x.elements() == 0) return;
  SsdCorrect(cuda, args, args.initial_state, /*reverse=*/false, args.states);
  RunForward(cuda, args, SsdPart::kRest);
  cuda.CheckLaunch("SsdForwardOutputs");
}

void SsdBackwardStates(Stream& stream, const SsdBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.dy.elements() == 0) return;
  SsdBackwardArgs from_zero = args;
  from_zero.d_final_state = Tensor();
  RunBackward(cuda, from_zero, SsdPart::kStates);
  SsdDecays(cuda, args.forward);
  cuda.CheckLaunch("SsdBackwardStates");
}

void SsdBackwardInputs(Stream& stream, const SsdBackwardArgs& args) {
  CudaStream& cuda = CudaStream::Of(stream);
  if (args.dy.elements() == 0) return;
  SsdCorrect(cuda, args.forward, args.d_final_state, /*reverse=*/true, args.d_states);
  RunBackward(cuda, args, SsdPart::kRest);
  cuda.CheckLaunch("SsdBackwardInputs");
}

}  // namespace muster::kernels::cuda
