// GEMMs with fused epilogues on the main loop of hopper_main_loop.cuh.
//
// The epilogue takes no time of the tensor cores: when a tile is complete, each thread rounds its
// sums to 16 bits, which halves them into free registers, and goes on with the next tile. While the
// MMAs of that tile run, the threads apply the epilogue to what they hold, an eighth (or a
// sixteenth) between each two steps. Four lanes exchange what they hold so that each has eight
// neighbours of a row: global accesses of 16 bytes without shared memory in between.
#include "kernels/gemm/gemm_hopper.h"

#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "base/status_macros.h"
#include "kernels/activation/activation.cuh"
#include "kernels/cuda/cluster_launch.cuh"
#include "kernels/cuda/column_sum.cuh"
#include "kernels/cuda/hopper.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tensor_map.h"
#include "kernels/device/cuda_status.h"
#include "kernels/gemm/hopper_main_loop.cuh"

namespace muster::kernels::cuda {
namespace {

using hopper_gemm::kCluster;
using hopper_gemm::kDepth;
using hopper_gemm::kThreads;
using hopper_gemm::kTileColumns;
using hopper_gemm::kTileRows;
using hopper_gemm::kWarpgroup;
using hopper_gemm::kWarps;
using hopper_gemm::Tile;

constexpr int kSumFloats = kWarps * kTileColumns;  // column sums of a tile
constexpr int kSharedBytes = hopper_gemm::SharedBytes(2 * kSumFloats * 4);

struct GemmParams {
  hopper_gemm::Grid grid;
  int rows, columns;  // of the activation
  const void* bias;
  const void* pre;
  void* out;
  void* activation;
  float* partial;
  const float* rotary;
  int rotary_rows, rotary_columns;
};

template <Fused kFused>
constexpr bool kIsGradient = kFused == Fused::kGeluGradient || kFused == Fused::kRelu2Gradient ||
                             kFused == Fused::kSwigluGradient;
// Whether the epilogue reads `pre`.
template <Fused kFused>
constexpr bool kReads = kIsGradient<kFused> || kFused == Fused::kResidual;
// With rotary: how many groups of 32 columns the halves of a head are apart.
template <Fused kFused>
constexpr int kHalfHead = kFused == Fused::kRotary64    ? 1
                          : kFused == Fused::kRotary128 ? 2
                                                        : 0;
// Columns of the activation in a tile.
template <Fused kFused>
constexpr int kColumnsOf = kFused == Fused::kSwiglu ? kTileColumns / 2 : kTileColumns;
constexpr int64_t ScratchRows(int64_t rows) {
  return (rows + kCluster * kTileRows - 1) / (kCluster * kTileRows) * kCluster * 2;
}

template <typename T>
__device__ uint32_t RoundPair(float low, float high) {
  const float pair[2] = {low, high};
  return FromFloats<T>(pair).words[0];
}

// What a thread holds of a complete tile: words[2j + h] are columns 8j + 2l and the next (l the
// lane in its quad) of row 8h + (lane / 4) of its warp's 16.
struct Held {
  uint32_t words[64];
};

// From word b of lane l, of block b, to word i of lane l, which is that of lane i of block l.
__device__ inline void TransposeQuad(uint32_t (&v)[4]) {
  const bool odd = threadIdx.x & 1;
  const bool upper = threadIdx.x & 2;
  const auto exchange = [](uint32_t& x, uint32_t& y, bool second, int distance) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, second ? x : y, distance);
    (second ? x : y) = other;
  };
  exchange(v[0], v[1], odd, 1);
  exchange(v[2], v[3], odd, 1);
  exchange(v[0], v[2], upper, 2);
  exchange(v[1], v[3], upper, 2);
}

template <typename T>
__device__ Pack<T, 8> TakeHeld(const Held& held, int block, int h) {
  uint32_t v[4];
#pragma unroll
  for (int b = 0; b < 4; ++b) v[b] = held.words[2 * (block + b) + h];
  TransposeQuad(v);
  Pack<T, 8> pack;
#pragma unroll
  for (int i = 0; i < 4; ++i) pack.words[i] = v[i];
  return pack;
}

// The epilogue of a tile, in kParts parts: part 2g + h takes columns 32g to 32g + 31 (with SwiGLU
// of `up`, too) and rows 8h to 8h + 7 of each warp's 16.
template <typename T, Fused kFused, bool kTransposeB>
struct Epilogue {
  using Params = GemmParams;
  using Pack8 = Pack<T, 8>;
  static constexpr bool kMnMajorA = false, kMnMajorB = !kTransposeB;
  static constexpr int kParts = kColumnsOf<kFused> / 16;

  const Params& p;
  float* const
      all_sums;  // column sums of two tiles, which take turns: one barrier a tile is enough
  float* sums;   // of the tile in `held`
  Held held = {};
  uint32_t bias[32];  // pairs of 16 bits, of the columns that this thread holds
  // Of the tile in `held`:
  bool any = false;   // there is one
  int rows_left = 0;  // from this thread's first row on
  int columns_left = 0;
  int64_t row = 0;
  int column = 0;
  int partial_row = 0;
  Pack8 before, before_up;  // of `pre`, for the next part
  Pack8 first_half;         // outputs of the even part, for the sums

  __device__ __forceinline__ Epilogue(const Params& params, char* memory)
      : p(params), all_sums(reinterpret_cast<float*>(memory)), sums(all_sums) {}

  // With SwiGLU one block of the cluster loads columns of the gate, the other the same ones of
  // `up`.
  __device__ __forceinline__ static int FirstColumn(const Params& p, const Tile& tile, int rank) {
    return kFused == Fused::kSwiglu ? tile.column * (kTileColumns / 2) + rank * p.columns
                                    : tile.column * kTileColumns + rank * (kTileColumns / 2);
  }

  __device__ __forceinline__ void Begin(const Tile& tile) {
    EndSums();
    LoadBias(tile);
    const int thread = threadIdx.x - kWarpgroup;
    const int lane = thread % kWarp;
    any = true;
    row = static_cast<int64_t>(tile.row) * kTileRows + thread / kWarp * 16 + lane / 4;
    column = tile.column * kColumnsOf<kFused> + lane % 4 * 8;
    rows_left = p.rows - static_cast<int>(row);
    columns_left = p.columns - column;
    partial_row = tile.row * 2 + thread / kWarpgroup;
    if constexpr (kReads<kFused>) Load(0);
  }

  __device__ __forceinline__ bool Has(int part) const {
    return rows_left > part % 2 * 8 && columns_left > part / 2 * 32;
  }
  __device__ __forceinline__ int64_t At(int64_t pitch, int part) const {
    return (row + part % 2 * 8) * pitch + column + part / 2 * 32;
  }

  __device__ __forceinline__ void Load(int part) {
    constexpr bool kTwoColumns = kFused == Fused::kSwigluGradient;
    if (!Has(part)) return;
    const int64_t pitch = kTwoColumns ? 2 * static_cast<int64_t>(p.columns) : p.columns;
    const T* const pre = static_cast<const T*>(p.pre) + At(pitch, part);
    before = LoadPack<8>(pre);
    if constexpr (kTwoColumns) before_up = LoadPack<8>(pre + p.columns);
  }

  template <int kPart>
  __device__ __forceinline__ void Do() {
    constexpr int kBlock = kPart / 2 * 4;
    constexpr int kHalf = kHalfHead<kFused>;
    if constexpr (kHalf > 0) {
      // A thread holds both elements of the pairs that it rotates: the part of the first half of a
      // head does the second half, too.
      if constexpr (kPart / 2 / kHalf % 2 == 0) {
        const Pack8 first = TakeHeld<T>(held, kBlock, kPart % 2);
        const Pack8 second = TakeHeld<T>(held, kBlock + 4 * kHalf, kPart % 2);
        if (Has(kPart)) Rotate(first, second, kPart);
      }
      return;
    }
    const Pack8 value = TakeHeld<T>(held, kBlock, kPart % 2);
    if constexpr (kFused == Fused::kSwiglu) {
      const Pack8 up = TakeHeld<T>(held, 16 + kBlock, kPart % 2);
      if (Has(kPart)) Swiglu(value, up, kPart);
    } else if constexpr (kFused == Fused::kResidual) {
      const Pack8 now = before;
      if constexpr (kPart + 1 < kParts) Load(kPart + 1);
      if (Has(kPart)) Add(value, now, kPart);
    } else if constexpr (!kIsGradient<kFused>) {
      if (Has(kPart)) Forward(value, kPart);
    } else {
      const Pack8 now = before, now_up = before_up;
      if constexpr (kPart + 1 < kParts) Load(kPart + 1);
      if constexpr (kFused == Fused::kSwigluGradient) {
        if (Has(kPart)) SwigluGradients(value, now, now_up, kPart);
      } else {
        Pack8 out = {};
        if (Has(kPart)) out = ActivationGradient(value, now, kPart);
        if (p.partial == nullptr) return;
        if (kPart % 2 == 0) {
          first_half = out;
        } else {
          KeepSums(first_half, out, kPart / 2);
        }
      }
    }
  }

  __device__ __forceinline__ void Forward(const Pack8& value, int part) {
    const int64_t at = At(p.columns, part);
    StorePack<8>(static_cast<T*>(p.out) + at, value);
    if constexpr (kFused == Fused::kGelu || kFused == Fused::kRelu2) {
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        y[i] = kFused == Fused::kGelu ? Gelu<T>(value[i]) : Relu2(value[i]);
      }
      StorePack<8>(static_cast<T*>(p.activation) + at, FromFloats<T>(y));
    }
  }

  __device__ __forceinline__ void Add(const Pack8& value, const Pack8& residual, int part) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = residual[i] + value[i];
    StorePack<8>(static_cast<T*>(p.out) + At(p.columns, part), FromFloats<T>(sum));
  }

  __device__ __forceinline__ void Rotate(Pack8 first, Pack8 second, int part) {
    constexpr int kHalf = kHalfHead<kFused> * 32;
    const int start = column + part / 2 * 32;
    if (start < p.rotary_columns) {
      const int angles = static_cast<int>(row + part % 2 * 8) % p.rotary_rows;
      const float* const cosines =
          p.rotary + static_cast<int64_t>(angles) * 2 * kHalf + start % (2 * kHalf);
      float cosine[8], sine[8], a[8], b[8];
      LoadFloats<8>(cosines, cosine);
      LoadFloats<8>(cosines + kHalf, sine);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        a[i] = first[i] * cosine[i] - second[i] * sine[i];
        b[i] = second[i] * cosine[i] + first[i] * sine[i];
      }
      first = FromFloats<T>(a);
      second = FromFloats<T>(b);
    }
    T* const out = static_cast<T*>(p.out) + At(p.columns, part);
    StorePack<8>(out, first);
    StorePack<8>(out + kHalf, second);
  }

  __device__ __forceinline__ void Swiglu(const Pack8& gate, const Pack8& up, int part) {
    T* const out = static_cast<T*>(p.out) + At(2 * static_cast<int64_t>(p.columns), part);
    StorePack<8>(out, gate);
    StorePack<8>(out + p.columns, up);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = cuda::Swiglu(gate[i], up[i]);
    StorePack<8>(static_cast<T*>(p.activation) + At(p.columns, part), FromFloats<T>(y));
  }

  __device__ __forceinline__ Pack8 ActivationGradient(const Pack8& value, const Pack8& pre,
                                                      int part) {
    float d[8], y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if constexpr (kFused == Fused::kRelu2Gradient) {
        d[i] = value[i] * Relu2Slope(pre[i]);
        y[i] = Relu2(pre[i]);
      } else {
        d[i] = value[i] * GeluSlope<T>(pre[i], y[i]);
      }
    }
    const Pack8 rounded = FromFloats<T>(d);
    const int64_t at = At(p.columns, part);
    StorePack<8>(static_cast<T*>(p.out) + at, rounded);
    if (p.activation != nullptr) {
      StorePack<8>(static_cast<T*>(p.activation) + at, FromFloats<T>(y));
    }
    return rounded;
  }

  __device__ __forceinline__ void SwigluGradients(const Pack8& value, const Pack8& gates,
                                                  const Pack8& ups, int part) {
    float gate[8], up[8], d[8];
    ToFloats(gates, gate);
    ToFloats(ups, up);
    ToFloats(value, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) SwigluGradient(gate[i], up[i], d[i]);
    T* const out = static_cast<T*>(p.out) + At(2 * static_cast<int64_t>(p.columns), part);
    StorePack<8>(out, FromFloats<T>(gate));
    StorePack<8>(out + p.columns, FromFloats<T>(up));
    if (p.activation != nullptr) {
      StorePack<8>(static_cast<T*>(p.activation) + At(p.columns, part), FromFloats<T>(d));
    }
  }

  // Adds up two rows, then over the eight lanes that have the same columns, so that each lane ends
  // with one of eight columns, which it leaves to EndSums. The sums are of the rounded outputs,
  // because these are what the next GEMM reads.
  __device__ __forceinline__ void KeepSums(const Pack8& first, const Pack8& second, int group) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = first[i] + second[i];
    const int thread = threadIdx.x - kWarpgroup;
#pragma unroll
    for (int width = 4, distance = 16; width > 0; width /= 2, distance /= 2) {
      const bool upper = threadIdx.x & distance;
#pragma unroll
      for (int i = 0; i < width; ++i) {
        const float other = __shfl_xor_sync(0xffffffffu, upper ? sum[i] : sum[i + width], distance);
        sum[i] = (upper ? sum[i + width] : sum[i]) + other;
      }
    }
    const int lane = threadIdx.x % kWarp;
    const int at = lane % 4 * 8 + (lane >> 4 & 1) * 4 + (lane >> 3 & 1) * 2 + (lane >> 2 & 1);
    sums[thread / kWarp * kTileColumns + group * 32 + at] = sum[0];
  }

  // The sums of a warpgroup's four warps, to one row of p.partial.
  __device__ __forceinline__ void EndSums() {
    if (kFused != Fused::kGeluGradient || p.partial == nullptr) return;
    const int thread = threadIdx.x - kWarpgroup;
    const int group = thread / kWarpgroup;
    hopper::NamedBarrier(1 + group, kWarpgroup);
    const int first = column - threadIdx.x % 4 * 8;
    if (!any) return;
#pragma unroll
    for (int c = thread % kWarpgroup; c < kTileColumns; c += kWarpgroup) {
      const float* of = sums + group * 4 * kTileColumns + c;
      const float total =
          ((of[0] + of[kTileColumns]) + of[2 * kTileColumns]) + of[3 * kTileColumns];
      if (first + c < p.columns) {
        p.partial[static_cast<int64_t>(partial_row) * p.columns + first + c] = total;
      }
    }
  }

  // Holds the tile, rounded, with the bias.
  __device__ __forceinline__ void Take(const Tile& /*tile*/, const float (&tile_sums)[128]) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      float low = 0, high = 0;
      if constexpr (!kIsGradient<kFused>) {
        Pack<T, 2> pair;
        pair.words[0] = bias[j];
        low = pair[0];
        high = pair[1];
      }
      held.words[2 * j] = RoundPair<T>(tile_sums[4 * j] + low, tile_sums[4 * j + 1] + high);
      held.words[2 * j + 1] = RoundPair<T>(tile_sums[4 * j + 2] + low, tile_sums[4 * j + 3] + high);
    }
    sums = sums == all_sums ? all_sums + kSumFloats : all_sums;
  }
  __device__ __forceinline__ void LoadBias(const Tile& tile) {
    if constexpr (kIsGradient<kFused>) return;
    const int first = tile.column * kColumnsOf<kFused> + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      const bool second = kFused == Fused::kSwiglu && j >= 16;
      const int column = first + (second ? j - 16 : j) * 8;
      bias[j] = 0;
      if (p.bias == nullptr || column >= p.columns) continue;
      bias[j] = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(p.bias) + column +
                                                   (second ? p.columns : 0));
    }
  }

  __device__ __forceinline__ void Finish() {
    DoFrom<0>();
    EndSums();
  }
  template <int kPart>
  __device__ __forceinline__ void DoFrom() {
    if constexpr (kPart < kParts) {
      Do<kPart>();
      DoFrom<kPart + 1>();
    }
  }
};

template <typename T, Fused kFused, bool kTransposeB>
__global__ void __launch_bounds__(kThreads, 1)
    HopperGemmKernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                     const GemmParams p) {
  hopper_gemm::RunMainLoop<T, Epilogue<T, kFused, kTransposeB>>(a, b, p);
}

template <typename T, Fused kFused, bool kTransposeB = !kIsGradient<kFused>>
absl::Status Launch(CudaStream& stream, const HopperGemm& gemm, float* partial) {
  const auto kernel = HopperGemmKernel<T, kFused, kTransposeB>;
  CUtensorMap a, b;
  RETURN_IF_ERROR(DescribeBoxes(gemm.a, kTileRows, a));
  RETURN_IF_ERROR(DescribeBoxes(gemm.b, kTransposeB ? kTileColumns / 2 : kDepth, b));
  const int64_t rows = gemm.a.dim(0), depth = gemm.a.dim(1);
  const int64_t columns = gemm.b.dim(kTransposeB ? 0 : 1) / (kFused == Fused::kSwiglu ? 2 : 1);
  GemmParams p;
  p.rows = static_cast<int>(rows);
  p.columns = static_cast<int>(columns);
  p.grid.depth_blocks = static_cast<int>(CeilDiv(depth, kDepth));
  p.grid.cluster_rows = static_cast<int>(CeilDiv(rows, kCluster * kTileRows));
  p.grid.tile_columns = static_cast<int>(CeilDiv(columns, kColumnsOf<kFused>));
  p.grid.tiles = p.grid.cluster_rows * p.grid.tile_columns;
  p.grid.group = 8;
  p.bias = gemm.bias.data();
  p.pre = gemm.pre.data();
  p.out = gemm.out.data();
  p.activation = gemm.activation.data();
  p.partial = partial;
  p.rotary = gemm.rotary.empty() ? nullptr : gemm.rotary.f32();
  p.rotary_rows = gemm.rotary.empty() ? 0 : static_cast<int>(gemm.rotary.dim(0));
  p.rotary_columns = static_cast<int>(gemm.rotary_columns);
  const int clusters = std::min(p.grid.tiles, stream.cuda_device().multiprocessors() / kCluster);
  return CudaStatus(
      LaunchClusters(stream, kernel, clusters, kCluster, kThreads, kSharedBytes, a, b, p),
      "GEMM with a fused epilogue");
}

template <typename T>
absl::Status LaunchFused(CudaStream& stream, const HopperGemm& gemm, float* partial) {
  switch (gemm.fused) {
    case Fused::kNone:
      return gemm.transpose_b ? Launch<T, Fused::kNone>(stream, gemm, nullptr)
                              : Launch<T, Fused::kNone, false>(stream, gemm, nullptr);
    case Fused::kGelu:
      return Launch<T, Fused::kGelu>(stream, gemm, nullptr);
    case Fused::kSwiglu:
      return Launch<T, Fused::kSwiglu>(stream, gemm, nullptr);
    case Fused::kRelu2:
      return Launch<T, Fused::kRelu2>(stream, gemm, nullptr);
    case Fused::kRelu2Gradient:
      return Launch<T, Fused::kRelu2Gradient>(stream, gemm, nullptr);
    case Fused::kGeluGradient:
      return Launch<T, Fused::kGeluGradient>(stream, gemm, partial);
    case Fused::kSwigluGradient:
      return Launch<T, Fused::kSwigluGradient>(stream, gemm, nullptr);
    case Fused::kResidual:
      return Launch<T, Fused::kResidual>(stream, gemm, nullptr);
    case Fused::kRotary64:
      return Launch<T, Fused::kRotary64>(stream, gemm, nullptr);
    case Fused::kRotary128:
      return Launch<T, Fused::kRotary128>(stream, gemm, nullptr);
  }
  return absl::InternalError("no such epilogue");
}

}  // namespace

bool HopperGemmServes(const CudaDevice& device, const HopperGemm& gemm) {
  const auto is_aligned = [](const Tensor& matrix) {
    return matrix.empty() || (Aligned16(matrix) && matrix.dim(matrix.rank() - 1) % 8 == 0);
  };
  constexpr int64_t limit = int64_t{1} << 30;  // coordinates of TMA are 32 bits
  const bool rotary = gemm.fused == Fused::kRotary64 || gemm.fused == Fused::kRotary128;
  const int64_t depth = gemm.fused == Fused::kRotary64 ? 64 : 128;
  if (rotary &&
      (gemm.rotary.dim(1) != depth || gemm.b.dim(0) % depth != 0 || !Aligned16(gemm.rotary))) {
    return false;
  }
  return HasWarpgroups(device) && gemm.a.dtype() != DType::kF32 && is_aligned(gemm.a) &&
         is_aligned(gemm.b) && is_aligned(gemm.bias) && is_aligned(gemm.pre) &&
         is_aligned(gemm.out) && is_aligned(gemm.activation) && gemm.a.dim(0) < limit &&
         gemm.b.dim(0) < limit && gemm.b.dim(1) < limit;
}

int64_t HopperGemmScratchBytes(const HopperGemm& gemm) {
  return gemm.column_sums.empty() ? 0 : ScratchRows(gemm.a.dim(0)) * gemm.b.dim(1) * 4;
}

absl::Status RunHopperGemm(CudaStream& stream, const HopperGemm& gemm, void* scratch) {
  auto* partial = gemm.column_sums.empty() ? nullptr : static_cast<float*>(scratch);
  RETURN_IF_ERROR(gemm.a.dtype() == DType::kBF16 ? LaunchFused<__nv_bfloat16>(stream, gemm, partial)
                                                 : LaunchFused<__half>(stream, gemm, partial));
  if (partial != nullptr) {
    AddPartials(stream, partial, ScratchRows(gemm.a.dim(0)), gemm.b.dim(1), gemm.accumulate,
                gemm.column_sums.f32(), nullptr);
  }
  return absl::OkStatus();
}

}  // namespace muster::kernels::cuda
