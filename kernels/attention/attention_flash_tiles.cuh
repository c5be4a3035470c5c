// Building blocks of attention_flash.cuh: tiles in shared memory, GEMMs of a warp's or warpgroup's
// rows, masks and the online softmax. Device code only.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_TILES_CUH_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_TILES_CUH_

#include <cmath>
#include <cstdint>

#include "kernels/attention/attention_problem.cuh"
#include "kernels/cuda/pack.cuh"
#include "kernels/cuda/tensor_core.cuh"
#include "kernels/cuda/warpgroup.cuh"

namespace muster::kernels::cuda::flash {

template <typename T>
using Problem = AttentionProblem<HeadsView<T>>;  // with a scale above 0

// What a block works on. Blocks take the same tile of all heads, then the next tile, so that under
// a causal mask those with the most work start first; for tiles of queries that needs `last_first`.
struct Place {
  int tile, head, batch;

  __device__ Place(int tiles, int heads, bool last_first) {
    const int pairs = static_cast<int>(gridDim.x) / tiles, pair = blockIdx.x % pairs;
    tile = blockIdx.x / pairs;
    if (last_first) tile = tiles - 1 - tile;
    head = pair % heads;
    batch = pair / heads;
  }
};

// Rows of 16-bit elements in shared memory: in slabs for MMAs by warpgroups (warpgroup.cuh), else
// padded by 8 elements, so that the eight rows that ldmatrix reads at a time lie in different
// banks.
template <int width, int rows, bool groups>
struct Tile {
  static constexpr int kWidth = width, kRows = rows, kStep = groups ? 64 : width + 8;
  static constexpr int kElements = groups ? rows * width : rows * kStep;
  static constexpr bool kGroups = groups;
  static constexpr int kSlab = rows * 64;

  __device__ static int At(int row, int column) {
    if constexpr (!groups) return row * kStep + column;
    return column / 64 * kSlab + row * 64 + (column / 8 % 8 ^ row % 8) * 8 + column % 8;
  }
};

// Starts to copy rows [begin, begin + kRows) of one head; zeros past the end.
template <typename Tile, int kThreads, typename T>
__device__ inline void LoadTile(const T* head, int64_t row_stride, int begin, int rows, int width,
                                T* tile) {
  constexpr int kPacks = Tile::kWidth / 8;
#pragma unroll
  for (int i = threadIdx.x; i < Tile::kRows * kPacks; i += kThreads) {
    const int row = i / kPacks, column = i % kPacks * 8;
    const bool inside = begin + row < rows && column < width;
    CopyAsyncOrZero<16>(tile + Tile::At(row, column),
                        inside ? head + (begin + row) * row_stride + column : head, inside);
  }
}

// Waits until the copies of every thread have arrived. Behind it, every thread has read the tiles
// before, which may be overwritten.
template <bool kGroups>
__device__ inline void AwaitTiles() {
  WaitCopies<0>();
  if constexpr (kGroups) hopper::FenceAsyncProxy();
  __syncthreads();
}

// Loads the left operands of kM x kK tiles of 16 x 16, from a row and column on.
template <typename Tile, int kM, int kK, typename T>
__device__ inline void LoadOperands(const T* tile, int row, int column,
                                    uint32_t (&words)[kM][kK][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      LoadMatrices<false>(
          words[m][k], tile + Tile::At(row + m * 16 + lane % 16, column + k * 16 + lane / 16 * 8));
    }
  }
}

// With warpgroups, waits until all but the last n commits are done, `sums` among them.
template <bool kGroups, int n, int kM, int kN>
__device__ inline void WaitSums(float (&sums)[kM][kN][4]) {
  if constexpr (kGroups) {
    hopper::WaitWgmma<n>();
    FenceRegisters(sums[0]);
  }
}

// A warp's rows of a tile as the left operand of GEMMs: read once into registers, or from shared
// memory each time.
template <typename Tile, bool kKeep, int kM, typename T>
class Left {
 public:
  static constexpr int kSteps = Tile::kWidth / 16;

  // Requires: the tile has arrived for every lane. `row`: the first of the warp.
  __device__ Left(const T* tile, int row) : tile_(tile), row_(row) {
    if constexpr (kKeep) LoadOperands<Tile, kM, kSteps>(tile, row, 0, words_);
  }
  // c = rows other^T, over kN x 8 rows of `other`, which points into a tile. With warpgroups it is
  // only started, as one commit.
  template <typename Other, int kN>
  __device__ void Times(const T* other, float (&c)[kM][kN][4]) const {
    if constexpr (Tile::kGroups) {
      TimesByGroup<Other>(other, c);
    } else {
      TimesByWarp<Other>(other, c);
    }
  }

 private:
  template <typename Other, int kN>
  __device__ void TimesByGroup(const T* other, float (&c)[kM][kN][4]) const {
    static_assert(kM == 1 && !kKeep);
    const uint64_t right = MatrixAt(other, 16, 1024);
    const uint64_t left = MatrixAt(tile_ + row_ / 64 * 64 * 64, 16, 1024);
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      // Addresses are in units of 16 bytes; a slab is four steps of 16 columns.
      const TileOperand a{left + k / 4 * (Tile::kSlab / 8) + k % 4 * 2};
      const uint64_t b = right + k / 4 * (Other::kSlab / 8) + k % 4 * 2;
      GroupMultiplyAdd<T, false>(c[0], a, b, k > 0);
    }
    hopper::CommitWgmma();
  }
  template <typename Other, int kN>
  __device__ void TimesByWarp(const T* other, float (&c)[kM][kN][4]) const {
    const int lane = threadIdx.x % kWarp;
    const T* const at = other + (lane / 16 * 8 + lane % 8) * Other::kStep + lane / 8 % 2 * 8;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) c[m][n][i] = 0;
      }
    }
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      uint32_t a[kM][1][4];
      if constexpr (!kKeep) LoadOperands<Tile>(tile_, row_, k * 16, a);
#pragma unroll
      for (int n = 0; n < kN; n += 2) {
        uint32_t b[4];
        LoadMatrices<false>(b, at + n * 8 * Other::kStep + k * 16);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const uint32_t(&left)[4] = Words(a, m, k);
          MultiplyAdd<T>(c[m][n], left, b[0], b[1]);
          MultiplyAdd<T>(c[m][n + 1], left, b[2], b[3]);
        }
      }
    }
  }
  __device__ const uint32_t (&Words(const uint32_t (&a)[kM][1][4], int m, int k) const)[4] {
    if constexpr (kKeep) {
      return words_[m][k];
    } else {
      return a[m][0];
    }
  }

  const T* tile_;
  int row_;
  uint32_t words_[kKeep ? kM : 1][kKeep ? kSteps : 1][4];
};

// Rounds scores to the left operand of the next GEMM.
template <typename T, int kM, int kN>
__device__ inline void RoundScores(const float (&c)[kM][kN][4], uint32_t (&words)[kM][kN / 2][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int k = 0; k < kN / 2; ++k) {
      words[m][k][0] = PackPair<T>(c[m][2 * k][0], c[m][2 * k][1]);
      words[m][k][1] = PackPair<T>(c[m][2 * k][2], c[m][2 * k][3]);
      words[m][k][2] = PackPair<T>(c[m][2 * k + 1][0], c[m][2 * k + 1][1]);
      words[m][k][3] = PackPair<T>(c[m][2 * k + 1][2], c[m][2 * k + 1][3]);
    }
  }
}

// sum += scores rows, over kK x 16 rows; `rows` points into a tile. With warpgroups it is only
// started, as one commit.
template <typename Tile, typename T, int kM, int kK>
__device__ inline void AddGemm(const uint32_t (&scores)[kM][kK][4], const T* rows,
                               float (&sum)[kM][Tile::kWidth / 8][4]) {
  if constexpr (Tile::kGroups) {
    const uint64_t right = MatrixAt(rows, Tile::kSlab * 2, 1024);
    hopper::FenceWgmma();
#pragma unroll
    for (int k = 0; k < kK; ++k) {
      GroupMultiplyAdd<T, true>(sum[0], RegisterOperand{scores[0][k]}, right + k * 128, 1);
    }
    hopper::CommitWgmma();
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const T* const at = rows + lane % 16 * Tile::kStep + lane / 16 * 8;
#pragma unroll
  for (int k = 0; k < kK; ++k) {
#pragma unroll
    for (int n = 0; n < Tile::kWidth / 8; n += 2) {
      uint32_t b[4];
      LoadMatrices<true>(b, at + k * 16 * Tile::kStep + n * 8);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        MultiplyAdd<T>(sum[m][n], scores[m][k], b[0], b[1]);
        MultiplyAdd<T>(sum[m][n + 1], scores[m][k], b[2], b[3]);
      }
    }
  }
}

// Writes a warp's rows to memory, multiplied by factor[m][h] in row 16 m + 8 h + g. They pass
// through rows `own` and following of a tile, which only this warp still uses; the first of them is
// row `begin` of the head.
template <typename Tile, typename T, int kM>
__device__ inline void StoreRows(const float (&sum)[kM][Tile::kWidth / 8][4],
                                 const float (&factor)[kM][2], T* tile, int own, T* head,
                                 int64_t row_stride, int begin, int rows, int width) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int n = 0; n < Tile::kWidth / 8; ++n) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        T* const at = tile + Tile::At(own + m * 16 + h * 8 + lane / 4, n * 8 + lane % 4 * 2);
        *reinterpret_cast<uint32_t*>(at) =
            PackPair<T>(sum[m][n][2 * h] * factor[m][h], sum[m][n][2 * h + 1] * factor[m][h]);
      }
    }
  }
  __syncwarp();
  constexpr int kPacks = Tile::kWidth / 8;
  for (int i = lane; i < kM * 16 * kPacks; i += kWarp) {
    const int row = i / kPacks, column = i % kPacks * 8;
    if (begin + row < rows && column < width) {
      StorePack<8>(head + (begin + row) * row_stride + column,
                   LoadPack<8>(tile + Tile::At(own + row, column)));
    }
  }
}

// Reductions over the four lanes that share rows.
__device__ inline float QuadMax(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ inline float QuadSum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sets scores to -inf where a query (rows, from `row` on) does not see a key (columns, from
// `column` on). first[i]: the first key that row i of the warp sees.
template <int kM, int kN>
__device__ inline void MaskKeys(int row, int column, int keys, bool causal, const int* first,
                                float (&s)[kM][kN][4]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = m * 16 + h * 8 + lane / 4;
      const int begin = first[own] - column - lane % 4 * 2;
      const int end = (causal ? min(row + own + 1, keys) : keys) - column - lane % 4 * 2;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          if (n * 8 + i < begin || n * 8 + i >= end) s[m][n][2 * h + i] = -INFINITY;
        }
      }
    }
  }
}

// One step of the online softmax: scores become probabilities relative to the row's maximum so far.
template <int kM, int kN, int kColumns>
__device__ inline void SoftmaxStep(float scale2, float (&s)[kM][kN][4], float (&most)[kM][2],
                                   float (&sum)[kM][2], float (&out)[kM][kColumns][4]) {
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float row_most = most[m][h];
#pragma unroll
      for (int n = 0; n < kN; ++n) {
        row_most = fmaxf(row_most, fmaxf(s[m][n][2 * h], s[m][n][2 * h + 1]));
      }
      row_most = QuadMax(row_most);
      // Until a row has seen a key, its maximum is -inf.
      const float base = row_most == -INFINITY ? 0.f : row_most * scale2;
      const float shrink = Exp2(most[m][h] * scale2 - base);
      most[m][h] = row_most;
      float row_sum = 0;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 2 * h; i < 2 * h + 2; ++i) {
          s[m][n][i] = Exp2(s[m][n][i] * scale2 - base);
          row_sum += s[m][n][i];
        }
      }
      sum[m][h] = sum[m][h] * shrink + row_sum;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        out[m][n][2 * h] *= shrink;
        out[m][n][2 * h + 1] *= shrink;
      }
    }
  }
}

// The keys that any query of a tile sees, in whole tiles of keys.
struct KeyRange {
  int begin, end;

  template <typename T>
  __device__ KeyRange(const Problem<T>& d, int b, int query, int queries, int tile) {
    begin = d.FirstKey(b, query) / tile * tile;
    end = d.causal ? min(d.keys, query + queries) : d.keys;
  }
};

template <typename Shape>
using QueryTile = Tile<Shape::kWidth, Shape::kQueries, Shape::kGroups>;
template <typename Shape>
using KeyTile = Tile<Shape::kWidth, Shape::kKeys, Shape::kGroups>;
// Rows that skip a tile in common: those of a warp or of a warpgroup.
template <typename Shape>
constexpr int kSkipRows = Shape::kGroups ? 64 : 16 * Shape::kM;

}  // namespace muster::kernels::cuda::flash

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_TILES_CUH_
