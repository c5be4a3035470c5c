// One block an SM, and a tile of 128 x 256 at a time: a producer warp keeps four stages of 64
// values of k on their way through the copy engine, and two warpgroups multiply 64 x 256 each. Two
// blocks form a cluster, have tiles above each other and share the columns' operand.
//
// The epilogue costs no time of the tensor cores': when a tile is complete, each thread rounds its
// sums to 16 bits, which halves them into registers that are free, and goes on with the next tile.
// While the products of that run, the threads apply the activation to what they hold, an eighth
// beside each of the next tile's first eight steps. Four lanes exchange what they hold so that each
// has eight neighbours of a row: global accesses of 16 bytes without shared memory in between.
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

namespace muster::kernels::cuda {
namespace {

constexpr int kWarpgroup = 128;
constexpr int kThreads = 3 * kWarpgroup;
constexpr int kTileRows = 128;
constexpr int kTileColumns = 256;
constexpr int kDepth = 64;  // of a stage: 128 bytes, a row of the swizzle
constexpr int kStages = 4;
constexpr int kCluster = 2;
constexpr int kTileABytes = kTileRows * kDepth * 2;
constexpr int kHalfBBytes = kTileColumns / 2 * kDepth * 2;
constexpr int kStageBytes = kTileABytes + 2 * kHalfBBytes;
constexpr int kSumWarps = 8;
constexpr int kSumBytes = 2 * kSumWarps * kTileColumns * 4;  // of two tiles
constexpr int kAlignment = 1024;
constexpr int kSharedBytes = kStages * kStageBytes + kSumBytes + 2 * kStages * 8 + kAlignment;

struct Params {
  int rows, columns;  // of the activation
  int depth_blocks;
  int cluster_rows, tile_columns, tiles;  // tiles of clusters
  int group;                              // rows of such tiles taken together
  const void* bias;
  const void* pre;
  void* out;
  void* activation;
  float* partial;
  const float* rotary;
  int rotary_rows, rotary_columns;
};

template <Fused kFused>
constexpr bool kIsGradient = kFused == Fused::kGeluGradient || kFused == Fused::kSwigluGradient;
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

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

constexpr int kProducerRegisters = 24;
constexpr int kConsumerRegisters = 240;

template <typename T>
__device__ uint32_t RoundPair(float low, float high) {
  const float pair[2] = {low, high};
  return FromFloats<T>(pair).words[0];
}

struct Shared {
  uint32_t stages, full, empty;  // addresses
  float* sums;

  __device__ uint32_t A(int stage) const { return stages + stage * kStageBytes; }
  __device__ uint32_t B(int stage) const { return A(stage) + kTileABytes; }
  __device__ uint32_t Full(int stage) const { return full + stage * 8; }
  __device__ uint32_t Empty(int stage) const { return empty + stage * 8; }
};

using Turn = hopper::Turn<kStages>;

// Tiles in groups of rows, columns by columns within a group, so that those of one moment form a
// block and find each other's operands in the L2 cache.
struct Tile {
  int row, column;  // in tiles of blocks

  __device__ Tile(const Params& p, int index, uint32_t rank) {
    const int in_group = p.group * p.tile_columns;
    const int first = index / in_group * p.group;
    const int height = min(p.group, p.cluster_rows - first);
    const int at = index % in_group;
    row = (first + at % height) * kCluster + static_cast<int>(rank);
    column = at / height;
  }
};

template <Fused kFused, bool kTransposeB>
__device__ void Produce(const CUtensorMap& a, const CUtensorMap& b, const Params& p,
                        const Shared& shared, uint32_t rank) {
  constexpr uint16_t kBoth = (1 << kCluster) - 1;
  Turn turn;
  for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
    const Tile tile(p, index, rank);
    const int half = static_cast<int>(rank);
    // Of the gate, and in the other half of `up`.
    const int column = kFused == Fused::kSwiglu
                           ? tile.column * (kTileColumns / 2) + half * p.columns
                           : tile.column * kTileColumns + half * 128;
    for (int k = 0; k < p.depth_blocks; ++k, turn.Next()) {
      hopper::WaitBarrier(shared.Empty(turn.stage), turn.parity ^ 1);
      const uint32_t full = shared.Full(turn.stage);
      hopper::ArriveExpecting(full, kStageBytes);
      hopper::LoadBox(&a, k * kDepth, tile.row * kTileRows, shared.A(turn.stage), full);
      const uint32_t to = shared.B(turn.stage) + half * kHalfBBytes;
      if constexpr (kTransposeB) {
        hopper::LoadBoxInto(kBoth, &b, k * kDepth, column, to, full);
      } else {
        hopper::LoadBoxInto(kBoth, &b, column, k * kDepth, to, full);
        hopper::LoadBoxInto(kBoth, &b, column + 64, k * kDepth, to + kHalfBBytes / 2, full);
      }
    }
  }
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

// The epilogue of one tile, in kParts parts: part 2g + h takes columns 32g to 32g + 31 (of `up`
// too) and the rows of half h of each warp.
template <typename T, Fused kFused>
struct Epilogue {
  static constexpr int kParts = kColumnsOf<kFused> / 16;
  using Pack8 = Pack<T, 8>;

  bool any = false;   // there is a tile
  int rows_left = 0;  // from this thread's first row on
  int columns_left = 0;
  int64_t row = 0;
  int column = 0;
  int partial_row = 0;
  Pack8 before, before_up;  // of `pre`, of the next part
  Pack8 first_half;         // of the outputs, for the sums

  __device__ __forceinline__ void Begin(const Params& p, const Tile& tile) {
    const int thread = threadIdx.x - kWarpgroup;
    const int lane = thread % kWarp;
    any = true;
    row = static_cast<int64_t>(tile.row) * kTileRows + thread / kWarp * 16 + lane / 4;
    column = tile.column * kColumnsOf<kFused> + lane % 4 * 8;
    rows_left = p.rows - static_cast<int>(row);
    columns_left = p.columns - column;
    partial_row = tile.row * 2 + thread / kWarpgroup;
    if constexpr (kReads<kFused>) Load(p, 0);
  }

  __device__ __forceinline__ bool Has(int part) const {
    return rows_left > part % 2 * 8 && columns_left > part / 2 * 32;
  }
  __device__ __forceinline__ int64_t At(int64_t pitch, int part) const {
    return (row + part % 2 * 8) * pitch + column + part / 2 * 32;
  }

  __device__ __forceinline__ void Load(const Params& p, int part) {
    constexpr bool kTwoColumns = kFused == Fused::kSwigluGradient;
    if (!Has(part)) return;
    const int64_t pitch = kTwoColumns ? 2 * static_cast<int64_t>(p.columns) : p.columns;
    const T* const pre = static_cast<const T*>(p.pre) + At(pitch, part);
    before = LoadPack<8>(pre);
    if constexpr (kTwoColumns) before_up = LoadPack<8>(pre + p.columns);
  }

  // Part kPart; `sums`: of this tile.
  template <int kPart>
  __device__ __forceinline__ void Do(const Params& p, const Held& held, float* sums) {
    constexpr int kBlock = kPart / 2 * 4;
    constexpr int kHalf = kHalfHead<kFused>;
    if constexpr (kHalf > 0) {
      // A thread holds both halves of what it turns: with the first half it does the second.
      if constexpr (kPart / 2 / kHalf % 2 == 0) {
        const Pack8 first = TakeHeld<T>(held, kBlock, kPart % 2);
        const Pack8 second = TakeHeld<T>(held, kBlock + 4 * kHalf, kPart % 2);
        if (Has(kPart)) Rotate(p, first, second, kPart);
      }
      return;
    }
    const Pack8 product = TakeHeld<T>(held, kBlock, kPart % 2);
    if constexpr (kFused == Fused::kSwiglu) {
      const Pack8 up = TakeHeld<T>(held, 16 + kBlock, kPart % 2);
      if (Has(kPart)) Swiglu(p, product, up, kPart);
    } else if constexpr (kFused == Fused::kResidual) {
      const Pack8 now = before;
      if constexpr (kPart + 1 < kParts) Load(p, kPart + 1);
      if (Has(kPart)) Add(p, product, now, kPart);
    } else if constexpr (!kIsGradient<kFused>) {
      if (Has(kPart)) Forward(p, product, kPart);
    } else {
      const Pack8 now = before, now_up = before_up;
      if constexpr (kPart + 1 < kParts) Load(p, kPart + 1);
      if constexpr (kFused == Fused::kSwigluGradient) {
        if (Has(kPart)) SwigluGradients(p, product, now, now_up, kPart);
      } else {
        Pack8 out = {};
        if (Has(kPart)) out = GeluGradient(p, product, now, kPart);
        if (p.partial == nullptr) return;
        if (kPart % 2 == 0) {
          first_half = out;
        } else {
          KeepSums(first_half, out, kPart / 2, sums);
        }
      }
    }
  }

  __device__ __forceinline__ void Forward(const Params& p, const Pack8& product, int part) {
    const int64_t at = At(p.columns, part);
    StorePack<8>(static_cast<T*>(p.out) + at, product);
    if constexpr (kFused == Fused::kGelu) {
      float y[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) y[i] = Gelu<T>(product[i]);
      StorePack<8>(static_cast<T*>(p.activation) + at, FromFloats<T>(y));
    }
  }

  __device__ __forceinline__ void Add(const Params& p, const Pack8& product, const Pack8& residual,
                                      int part) {
    float sum[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) sum[i] = residual[i] + product[i];
    StorePack<8>(static_cast<T*>(p.out) + At(p.columns, part), FromFloats<T>(sum));
  }

  __device__ __forceinline__ void Rotate(const Params& p, Pack8 first, Pack8 second, int part) {
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

  __device__ __forceinline__ void Swiglu(const Params& p, const Pack8& gate, const Pack8& up,
                                         int part) {
    T* const out = static_cast<T*>(p.out) + At(2 * static_cast<int64_t>(p.columns), part);
    StorePack<8>(out, gate);
    StorePack<8>(out + p.columns, up);
    float y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) y[i] = cuda::Swiglu(gate[i], up[i]);
    StorePack<8>(static_cast<T*>(p.activation) + At(p.columns, part), FromFloats<T>(y));
  }

  __device__ __forceinline__ Pack8 GeluGradient(const Params& p, const Pack8& product,
                                                const Pack8& pre, int part) {
    float d[8], y[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) d[i] = product[i] * GeluSlope<T>(pre[i], y[i]);
    const Pack8 rounded = FromFloats<T>(d);
    const int64_t at = At(p.columns, part);
    StorePack<8>(static_cast<T*>(p.out) + at, rounded);
    if (p.activation != nullptr) {
      StorePack<8>(static_cast<T*>(p.activation) + at, FromFloats<T>(y));
    }
    return rounded;
  }

  __device__ __forceinline__ void SwigluGradients(const Params& p, const Pack8& product,
                                                  const Pack8& gates, const Pack8& ups, int part) {
    float gate[8], up[8], d[8];
    ToFloats(gates, gate);
    ToFloats(ups, up);
    ToFloats(product, d);
#pragma unroll
    for (int i = 0; i < 8; ++i) SwigluGradient(gate[i], up[i], d[i]);
    T* const out = static_cast<T*>(p.out) + At(2 * static_cast<int64_t>(p.columns), part);
    StorePack<8>(out, FromFloats<T>(gate));
    StorePack<8>(out + p.columns, FromFloats<T>(up));
    if (p.activation != nullptr) {
      StorePack<8>(static_cast<T*>(p.activation) + At(p.columns, part), FromFloats<T>(d));
    }
  }

  // Adds up two rows, and these over the eight lanes that have the same columns, so that each lane
  // ends with one of eight columns, and leaves that for EndSums. Of what the next products read.
  __device__ __forceinline__ void KeepSums(const Pack8& first, const Pack8& second, int group,
                                           float* sums) {
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
  __device__ __forceinline__ void EndSums(const Params& p, const float* sums) {
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
};

template <typename T, Fused kFused, bool kTransposeB>
struct Consumer {
  const Params& p;
  const Shared& shared;
  uint32_t a_offset;  // this warpgroup's rows of a stage
  Turn turn;
  int released = 0;  // the stage that comes free next

  // Issues the products of one stage.
  __device__ __forceinline__ void Multiply(float (&sums)[128], bool first) {
    hopper::WaitBarrier(shared.Full(turn.stage), turn.parity);
    const uint32_t a = shared.A(turn.stage) + a_offset;
    const uint32_t b = shared.B(turn.stage);
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kDepth / 16; ++k) {
      const uint64_t left = hopper::Operand(a + k * 32, 16, 1024);
      const uint64_t right = kTransposeB ? hopper::Operand(b + k * 32, 16, 1024)
                                         : hopper::Operand(b + k * 2048, kHalfBBytes / 2, 1024);
      hopper::Multiply<T, !kTransposeB>(sums, left, right, !first || k > 0);
    }
    hopper::CommitWgmma();
    turn.Next();
  }
  // The oldest stage that has not been, in both blocks.
  __device__ __forceinline__ void Release() {
    const uint32_t lane = threadIdx.x % kWarp;
    if (lane < kCluster) hopper::ArriveAt(shared.Empty(released), lane);
    released = released + 1 == kStages ? 0 : released + 1;
  }

  // The products of a tile, and beside them the epilogue of the one before: a part after every
  // kParts-th of the stages.
  template <int kPart>
  __device__ __forceinline__ void Stages(int stages, int done, float (&sums)[128], const Held& held,
                                         Epilogue<T, kFused>& epilogue, float* column_sums) {
    constexpr int kParts = Epilogue<T, kFused>::kParts;
    if constexpr (kPart < kParts) {
      const int until = stages * (kPart + 1) / kParts;
      for (; done < until; ++done) {
        Multiply(sums, done == 0);
        if (done == 0) continue;
        hopper::WaitWgmma<1>();
        Release();
      }
      epilogue.template Do<kPart>(p, held, column_sums);
      Stages<kPart + 1>(stages, done, sums, held, epilogue, column_sums);
    }
  }
  template <int kPart>
  __device__ __forceinline__ void LastEpilogue(const Held& held, Epilogue<T, kFused>& epilogue,
                                               float* column_sums) {
    if constexpr (kPart < Epilogue<T, kFused>::kParts) {
      epilogue.template Do<kPart>(p, held, column_sums);
      LastEpilogue<kPart + 1>(held, epilogue, column_sums);
    }
  }

  // Rounded, with the bias.
  __device__ __forceinline__ void Hold(const float (&sums)[128], const uint32_t (&bias)[32],
                                       Held& held) {
#pragma unroll
    for (int j = 0; j < 32; ++j) {
      float low = 0, high = 0;
      if constexpr (!kIsGradient<kFused>) {
        Pack<T, 2> pair;
        pair.words[0] = bias[j];
        low = pair[0];
        high = pair[1];
      }
      held.words[2 * j] = RoundPair<T>(sums[4 * j] + low, sums[4 * j + 1] + high);
      held.words[2 * j + 1] = RoundPair<T>(sums[4 * j + 2] + low, sums[4 * j + 3] + high);
    }
  }
  __device__ __forceinline__ void LoadBias(const Tile& tile, uint32_t (&bias)[32]) {
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

  __device__ __forceinline__ void Run(uint32_t rank) {
    float sums[128];
    Held held = {};
    Epilogue<T, kFused> epilogue;  // of the tile before
    float* column_sums = shared.sums;
    for (int index = blockIdx.x / kCluster; index < p.tiles; index += gridDim.x / kCluster) {
      const Tile tile(p, index, rank);
      Stages<0>(p.depth_blocks, 0, sums, held, epilogue, column_sums);
      epilogue.EndSums(p, column_sums);
      uint32_t bias[32];
      LoadBias(tile, bias);
      epilogue.Begin(p, tile);
      hopper::WaitWgmma<0>();
      hopper::FenceSums(sums);
      Release();
      Hold(sums, bias, held);
      // Two tiles' in turns: one barrier a tile is enough.
      column_sums = column_sums == shared.sums ? shared.sums + kSumBytes / 8 : shared.sums;
    }
    LastEpilogue<0>(held, epilogue, column_sums);
    epilogue.EndSums(p, column_sums);
  }
};

#endif  // __CUDA_ARCH_FEAT_SM90_ALL

template <typename T, Fused kFused, bool kTransposeB>
__global__ void __launch_bounds__(kThreads, 1)
    HopperGemmKernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                     const Params p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ char unaligned[];
  const uint32_t skip = -hopper::SharedAddress(unaligned) & (kAlignment - 1);
  Shared shared;
  shared.stages = hopper::SharedAddress(unaligned) + skip;
  shared.full = shared.stages + kStages * kStageBytes + kSumBytes;
  shared.empty = shared.full + kStages * 8;
  shared.sums = reinterpret_cast<float*>(unaligned + skip + kStages * kStageBytes);
  const uint32_t rank = hopper::ClusterRank();
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      hopper::InitBarrier(shared.Full(stage), 1);
      hopper::InitBarrier(shared.Empty(stage), kCluster * 2 * kWarpgroup / kWarp);
    }
    hopper::FenceBarrierInit();
    hopper::PrefetchMap(&a);
    hopper::PrefetchMap(&b);
  }
  hopper::ClusterSync();
  if (threadIdx.x < kWarpgroup) {
    hopper::GiveRegisters<kProducerRegisters>();
    if (threadIdx.x == 0) Produce<kFused, kTransposeB>(a, b, p, shared, rank);
    hopper::ClusterSync();
  } else {
    hopper::TakeRegisters<kConsumerRegisters>();
    const uint32_t warpgroup = threadIdx.x / kWarpgroup - 1;
    Consumer<T, kFused, kTransposeB>{p, shared, warpgroup * (kTileABytes / 2)}.Run(rank);
    // Nobody leaves while the other block may still write here.
    hopper::ClusterSync();
  }
#endif
}

template <typename T, Fused kFused, bool kTransposeB = !kIsGradient<kFused>>
absl::Status Launch(CudaStream& stream, const HopperGemm& gemm, float* partial) {
  const auto kernel = HopperGemmKernel<T, kFused, kTransposeB>;
  CUtensorMap a, b;
  RETURN_IF_ERROR(DescribeBoxes(gemm.a, kTileRows, a));
  RETURN_IF_ERROR(DescribeBoxes(gemm.b, kTransposeB ? kTileColumns / 2 : kDepth, b));
  const int64_t rows = gemm.a.dim(0), depth = gemm.a.dim(1);
  const int64_t columns = gemm.b.dim(kTransposeB ? 0 : 1) / (kFused == Fused::kSwiglu ? 2 : 1);
  Params p;
  p.rows = static_cast<int>(rows);
  p.columns = static_cast<int>(columns);
  p.depth_blocks = static_cast<int>(CeilDiv(depth, kDepth));
  p.cluster_rows = static_cast<int>(CeilDiv(rows, kCluster * kTileRows));
  p.tile_columns = static_cast<int>(CeilDiv(columns, kColumnsOf<kFused>));
  p.tiles = p.cluster_rows * p.tile_columns;
  p.group = 8;
  p.bias = gemm.bias.data();
  p.pre = gemm.pre.data();
  p.out = gemm.out.data();
  p.activation = gemm.activation.data();
  p.partial = partial;
  p.rotary = gemm.rotary.empty() ? nullptr : gemm.rotary.f32();
  p.rotary_rows = gemm.rotary.empty() ? 0 : static_cast<int>(gemm.rotary.dim(0));
  p.rotary_columns = static_cast<int>(gemm.rotary_columns);
  const int clusters = std::min(p.tiles, stream.cuda_device().multiprocessors() / kCluster);
  return CudaStatus(
      LaunchClusters(stream, kernel, clusters, kCluster, kThreads, kSharedBytes, a, b, p),
      "a product with an epilogue");
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
  const auto serves = [](const Tensor& matrix) {
    return matrix.empty() || (Aligned16(matrix) && matrix.dim(matrix.rank() - 1) % 8 == 0);
  };
  constexpr int64_t limit = int64_t{1} << 30;  // of coordinates
  const bool rotary = gemm.fused == Fused::kRotary64 || gemm.fused == Fused::kRotary128;
  const int64_t depth = gemm.fused == Fused::kRotary64 ? 64 : 128;
  if (rotary &&
      (gemm.rotary.dim(1) != depth || gemm.b.dim(0) % depth != 0 || !Aligned16(gemm.rotary))) {
    return false;
  }
  return HasWarpgroups(device) && gemm.a.dtype() != DType::kF32 && serves(gemm.a) &&
         serves(gemm.b) && serves(gemm.bias) && serves(gemm.pre) && serves(gemm.out) &&
         serves(gemm.activation) && gemm.a.dim(0) < limit && gemm.b.dim(0) < limit &&
         gemm.b.dim(1) < limit;
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
