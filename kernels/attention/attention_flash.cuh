// The kernels of attention_flash.cu: FlashAttention-2 (arXiv 2307.08691) on the tensor cores, for
// 16-bit tensors of any head width up to kWidth (a multiple of 8; the rest is read as zeros).
//
// MMAs are issued by warps (tensor_core.cuh), or on Hopper by warpgroups (warpgroup.cuh); operands
// and sums are laid out over threads in the same way.
//
// A warp owns rows: queries in forward and dq, keys in dk and dv, where scores are computed
// transposed. Its scores stay in registers and become the left operand of the second GEMM there.
// The tiles of the other side pass through shared memory, two at a time, and all warps read them.
// Every sum belongs to one warp and is taken in one order, without atomics: the bits repeat.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_CUH_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_CUH_

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

template <typename Shape>
constexpr int ForwardBytes() {
  return (QueryTile<Shape>::kElements + 4 * KeyTile<Shape>::kElements) * 2 + Shape::kQueries * 4;
}

// Shape: kWidth, kM (tiles of 16 queries of a warp), kWarps, kKeys (of a tile), kKeep (queries stay
// in registers), kGroups (MMAs by warpgroups), kBlocks (of a multiprocessor, for the compiler).
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kWarps* kWarp, Shape::kBlocks)
    ForwardKernel(const Problem<T> d, int tiles) {
  constexpr int kWidth = Shape::kWidth, kM = Shape::kM, kKeys = Shape::kKeys;
  constexpr int kQueries = Shape::kQueries, kThreads = Shape::kWarps * kWarp;
  constexpr int kRows = kSkipRows<Shape>;
  using Rows = QueryTile<Shape>;
  using Keys = KeyTile<Shape>;
  extern __shared__ __align__(1024) uint4 memory[];
  T* const q_tile = reinterpret_cast<T*>(memory);
  T* const k_tiles = q_tile + Rows::kElements;
  T* const v_tiles = k_tiles + 2 * Keys::kElements;
  int* const first = reinterpret_cast<int*>(v_tiles + 2 * Keys::kElements);
  const Place at(tiles, d.heads, /*last_first=*/d.causal);
  const int b = at.batch, query0 = at.tile * kQueries;
  const int key_head = at.head / (d.heads / d.key_heads);
  const int own = threadIdx.x / kWarp * 16 * kM, row0 = query0 + own;  // of this warp
  const int skip_row = own / kRows * kRows, rows0 = query0 + skip_row;
  const int lane = threadIdx.x % kWarp;
  const T* const k = d.k.Head(b, key_head);
  const T* const v = d.v.Head(b, key_head);
  const KeyRange range(d, b, query0, kQueries, kKeys);
  const auto load = [&](int key, int buffer) {
    const int offset = buffer * Keys::kElements;
    LoadTile<Keys, kThreads>(k, d.k.row_stride, key, d.keys, d.width, k_tiles + offset);
    LoadTile<Keys, kThreads>(v, d.v.row_stride, key, d.keys, d.width, v_tiles + offset);
  };
  LoadTile<Rows, kThreads>(d.q.Head(b, at.head), d.q.row_stride, query0, d.queries, d.width,
                           q_tile);
  for (int i = threadIdx.x; i < kQueries; i += kThreads) first[i] = d.FirstKey(b, query0 + i);
  if (range.begin < range.end) load(range.begin, 0);
  CommitCopies();
  AwaitTiles<Shape::kGroups>();
  const Left<Rows, Shape::kKeep, kM, T> q(q_tile, own);
  const int first_first = first[skip_row], last_first = first[skip_row + kRows - 1];
  const float scale2 = d.scale * kLog2E;
  float most[kM][2], sum[kM][2] = {}, out[kM][kWidth / 8][4] = {};
#pragma unroll
  for (int m = 0; m < kM; ++m) most[m][0] = most[m][1] = -INFINITY;
  int buffer = 0;
  for (int key = range.begin; key < range.end; key += kKeys, buffer ^= 1) {
    AwaitTiles<Shape::kGroups>();
    if (key + kKeys < range.end) load(key + kKeys, buffer ^ 1);
    CommitCopies();
    if (rows0 >= d.queries || (d.causal && key >= rows0 + kRows) || first_first >= key + kKeys) {
      continue;
    }
    const int offset = buffer * Keys::kElements;
    float s[kM][kKeys / 8][4];
    q.template Times<Keys>(k_tiles + offset, s);
    WaitSums<Shape::kGroups, 0>(s);
    if (key + kKeys > d.keys || (d.causal && key + kKeys > row0 + 1) || last_first > key) {
      MaskKeys(row0, key, d.keys, d.causal, first + own, s);
    }
    SoftmaxStep(scale2, s, most, sum, out);
    uint32_t p[kM][kKeys / 16][4];
    RoundScores<T>(s, p);
    AddGemm<Keys>(p, v_tiles + offset, out);
    WaitSums<Shape::kGroups, 0>(out);
  }
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float total = QuadSum(sum[m][h]);
      factor[m][h] = total == 0 ? 0.f : 1 / total;
      const int row = row0 + m * 16 + h * 8 + lane / 4;
      if (lane % 4 == 0 && row < d.queries) {
        d.lse[d.Statistic(b, at.head, row)] =
            total == 0 ? -INFINITY : most[m][h] * d.scale + logf(total);
      }
    }
  }
  if constexpr (Shape::kGroups) __syncthreads();
  StoreRows<Rows>(out, factor, q_tile, own, d.out.Head(b, at.head), d.out.row_stride, row0,
                  d.queries, d.width);
}

constexpr int kDeltaThreads = 256;

// delta = row sums of dout * out, by `lanes` lanes a row (a power of two up to 16).
template <typename T>
__global__ void __launch_bounds__(kDeltaThreads)
    DeltaKernel(const Problem<T> d, int64_t rows, int lanes) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kDeltaThreads + threadIdx.x;
  const int64_t index = thread / lanes;  // (sample, query, head): neighbours in memory
  const int column = static_cast<int>(thread % lanes) * 8;
  const bool inside = index < rows;
  const int head = static_cast<int>(index % d.heads);
  const int row = static_cast<int>(index / d.heads % d.queries);
  const int b = static_cast<int>(index / d.heads / d.queries);
  float sum = 0;
  if (inside && column < d.width) {
    float x[8], y[8];
    LoadFloats<8>(d.out.Head(b, head) + row * d.out.row_stride + column, x);
    LoadFloats<8>(d.dout.Head(b, head) + row * d.dout.row_stride + column, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
  }
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  }
  if (inside && column == 0) d.delta[d.Statistic(b, head, row)] = sum;
}

// lse as a power of two, and +inf for a query without any key, whose probabilities become 0.
__device__ inline float Base(float lse) { return lse == -INFINITY ? INFINITY : lse * kLog2E; }

template <typename Shape>
constexpr int QueryGradientBytes() {
  return (2 * QueryTile<Shape>::kElements + 4 * KeyTile<Shape>::kElements) * 2 +
         Shape::kQueries * 4;
}

// Shape: as ForwardKernel's, and kPart (keys of a tile at a time).
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kWarps* kWarp, Shape::kBlocks)
    QueryGradientKernel(const Problem<T> d, int tiles) {
  constexpr int kWidth = Shape::kWidth, kM = Shape::kM, kKeys = Shape::kKeys;
  constexpr int kPart = Shape::kPart, kQueries = Shape::kQueries;
  constexpr int kThreads = Shape::kWarps * kWarp, kRows = kSkipRows<Shape>;
  using Rows = QueryTile<Shape>;
  using Keys = KeyTile<Shape>;
  extern __shared__ __align__(1024) uint4 memory[];
  T* const q_tile = reinterpret_cast<T*>(memory);
  T* const dout_tile = q_tile + Rows::kElements;
  T* const k_tiles = dout_tile + Rows::kElements;
  T* const v_tiles = k_tiles + 2 * Keys::kElements;
  int* const first = reinterpret_cast<int*>(v_tiles + 2 * Keys::kElements);
  const Place at(tiles, d.heads, /*last_first=*/d.causal);
  const int b = at.batch, query0 = at.tile * kQueries;
  const int key_head = at.head / (d.heads / d.key_heads);
  const int own = threadIdx.x / kWarp * 16 * kM, row0 = query0 + own;
  const int skip_row = own / kRows * kRows, rows0 = query0 + skip_row;
  const int lane = threadIdx.x % kWarp;
  const T* const k = d.k.Head(b, key_head);
  const T* const v = d.v.Head(b, key_head);
  const KeyRange range(d, b, query0, kQueries, kKeys);
  const auto load = [&](int key, int buffer) {
    const int offset = buffer * Keys::kElements;
    LoadTile<Keys, kThreads>(k, d.k.row_stride, key, d.keys, d.width, k_tiles + offset);
    LoadTile<Keys, kThreads>(v, d.v.row_stride, key, d.keys, d.width, v_tiles + offset);
  };
  LoadTile<Rows, kThreads>(d.q.Head(b, at.head), d.q.row_stride, query0, d.queries, d.width,
                           q_tile);
  LoadTile<Rows, kThreads>(d.dout.Head(b, at.head), d.dout.row_stride, query0, d.queries, d.width,
                           dout_tile);
  for (int i = threadIdx.x; i < kQueries; i += kThreads) first[i] = d.FirstKey(b, query0 + i);
  if (range.begin < range.end) load(range.begin, 0);
  CommitCopies();
  float base[kM][2], delta[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row0 + m * 16 + h * 8 + lane / 4;
      const bool inside = row < d.queries;
      base[m][h] = inside ? Base(d.lse[d.Statistic(b, at.head, row)]) : INFINITY;
      delta[m][h] = inside ? d.delta[d.Statistic(b, at.head, row)] : 0.f;
    }
  }
  AwaitTiles<Shape::kGroups>();
  const Left<Rows, Shape::kKeep, kM, T> q(q_tile, own);
  const Left<Rows, Shape::kKeep, kM, T> dout(dout_tile, own);
  const int first_first = first[skip_row], last_first = first[skip_row + kRows - 1];
  const float scale2 = d.scale * kLog2E;
  float dq[kM][kWidth / 8][4] = {};
  int buffer = 0;
  for (int tile = range.begin; tile < range.end; tile += kKeys, buffer ^= 1) {
    AwaitTiles<Shape::kGroups>();
    if (tile + kKeys < range.end) load(tile + kKeys, buffer ^ 1);
    CommitCopies();
#pragma unroll 1
    for (int part = 0; part < kKeys; part += kPart) {
      const int key = tile + part;
      if (rows0 >= d.queries || key >= d.keys || (d.causal && key >= rows0 + kRows) ||
          first_first >= key + kPart) {
        continue;
      }
      const int offset = buffer * Keys::kElements + part * Keys::kStep;
      float s[kM][kPart / 8][4], dp[kM][kPart / 8][4];
      q.template Times<Keys>(k_tiles + offset, s);
      dout.template Times<Keys>(v_tiles + offset, dp);
      WaitSums<Shape::kGroups, 1>(s);
      if (key + kPart > d.keys || (d.causal && key + kPart > row0 + 1) || last_first > key) {
        MaskKeys(row0, key, d.keys, d.causal, first + own, s);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            s[m][n][i] = Exp2(s[m][n][i] * scale2 - base[m][i / 2]);
          }
        }
      }
      WaitSums<Shape::kGroups, 0>(dp);
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - delta[m][i / 2]);
          }
        }
      }
      uint32_t ds[kM][kPart / 16][4];
      RoundScores<T>(dp, ds);
      AddGemm<Keys>(ds, k_tiles + offset, dq);
      WaitSums<Shape::kGroups, 0>(dq);
    }
  }
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = d.scale;
  if constexpr (Shape::kGroups) __syncthreads();
  StoreRows<Rows>(dq, factor, q_tile, own, d.dq.Head(b, at.head), d.dq.row_stride, row0, d.queries,
                  d.width);
}

// The first query of [begin, queries) that does not see `key` because its document begins behind
// it. Called by a whole warp.
template <typename T>
__device__ inline int LastQuery(const Problem<T>& d, int b, int begin, int key) {
  if (d.documents == nullptr) return d.queries;
  const int lane = threadIdx.x % kWarp;
  int low = begin,
      high = d.queries;  // queries before `low` see the key, those from `high` on do not
  while (low < high) {
    const int step = (high - low + kWarp - 1) / kWarp;
    const int probe = low + lane * step;
    const bool sees = probe < high && d.FirstKey(b, probe) <= key;
    const int count = __popc(__ballot_sync(0xffffffffu, sees));
    if (count == 0) break;
    high = min(high, low + count * step);
    low += (count - 1) * step + 1;
  }
  return low;
}

template <typename Shape>
constexpr int KeyValueGradientBytes() {
  return (2 * KeyTile<Shape>::kElements + 4 * QueryTile<Shape>::kElements) * 2 +
         2 * 3 * Shape::kQueries * 4;
}

// Shape: kWidth, kM (tiles of 16 keys of a warp), kWarps, kQueries (of a tile), kPart (queries at a
// time), kKeep (keys and values in registers), kBlocks.
template <typename T, typename Shape>
__global__ void __launch_bounds__(Shape::kWarps* kWarp, Shape::kBlocks)
    KeyValueGradientKernel(const Problem<T> d, int tiles) {
  constexpr int kWidth = Shape::kWidth, kM = Shape::kM, kQueries = Shape::kQueries;
  constexpr int kPart = Shape::kPart, kKeys = Shape::kKeys, kThreads = Shape::kWarps * kWarp;
  constexpr int kRows = kSkipRows<Shape>;
  using Rows = KeyTile<Shape>;
  using Queries = QueryTile<Shape>;
  extern __shared__ __align__(1024) uint4 memory[];
  T* const k_tile = reinterpret_cast<T*>(memory);
  T* const v_tile = k_tile + Rows::kElements;
  T* const q_tiles = v_tile + Rows::kElements;
  T* const dout_tiles = q_tiles + 2 * Queries::kElements;
  // Of a tile's queries: lse, delta, and where their documents begin.
  auto* const statistics = reinterpret_cast<float*>(dout_tiles + 2 * Queries::kElements);
  const Place at(tiles, d.key_heads, /*last_first=*/false);
  const int b = at.batch, key0 = at.tile * kKeys, group = d.heads / d.key_heads;
  const int own = threadIdx.x / kWarp * 16 * kM, row0 = key0 + own;
  const int rows0 = key0 + own / kRows * kRows;
  const int lane = threadIdx.x % kWarp;
  const int begin = d.causal ? key0 / kQueries * kQueries : 0;
  const int end = LastQuery(d, b, begin, min(key0 + kKeys, d.keys) - 1);
  const int tiles_of_head = end > begin ? (end - begin + kQueries - 1) / kQueries : 0;
  const auto load = [&](int head, int query, int buffer) {
    const int offset = buffer * Queries::kElements;
    LoadTile<Queries, kThreads>(d.q.Head(b, head), d.q.row_stride, query, d.queries, d.width,
                                q_tiles + offset);
    LoadTile<Queries, kThreads>(d.dout.Head(b, head), d.dout.row_stride, query, d.queries, d.width,
                                dout_tiles + offset);
    float* const to = statistics + buffer * 3 * kQueries;
    for (int i = threadIdx.x; i < kQueries; i += kThreads) {
      const bool inside = query + i < d.queries;
      const int64_t from = d.Statistic(b, head, inside ? query + i : 0);
      CopyAsyncOrZero<4>(to + i, d.lse + from, inside);
      CopyAsyncOrZero<4>(to + kQueries + i, d.delta + from, inside);
      if (d.documents != nullptr) {
        CopyAsyncOrZero<4>(to + 2 * kQueries + i,
                           d.documents + b * d.documents_stride + min(query + i, d.queries - 1),
                           true);
      }
    }
  };
  LoadTile<Rows, kThreads>(d.k.Head(b, at.head), d.k.row_stride, key0, d.keys, d.width, k_tile);
  LoadTile<Rows, kThreads>(d.v.Head(b, at.head), d.v.row_stride, key0, d.keys, d.width, v_tile);
  int next_head = at.head * group, next_query = begin;
  const int rounds = tiles_of_head * group;
  if (rounds > 0) load(next_head, next_query, 0);
  CommitCopies();
  AwaitTiles<Shape::kGroups>();
  const Left<Rows, Shape::kKeep, kM, T> k(k_tile, own);
  const Left<Rows, Shape::kKeep, kM, T> v(v_tile, own);
  const float scale2 = d.scale * kLog2E;
  const int position = static_cast<int>(d.key_position) + row0;  // of the warp's first key
  float dk[kM][kWidth / 8][4] = {}, dv[kM][kWidth / 8][4] = {};
  for (int round = 0; round < rounds; ++round) {
    const int tile = next_query, buffer = round % 2;
    AwaitTiles<Shape::kGroups>();
    next_query += kQueries;
    if (next_query >= end) {
      next_query = begin;
      ++next_head;
    }
    if (round + 1 < rounds) load(next_head, next_query, buffer ^ 1);
    CommitCopies();
#pragma unroll 1
    for (int part = 0; part < kQueries; part += kPart) {
      const int query = tile + part;
      const float* const lse = statistics + buffer * 3 * kQueries + part;
      const float* const delta = lse + kQueries;
      const int* const document = reinterpret_cast<const int*>(lse + 2 * kQueries);
      const bool apart = d.documents != nullptr;
      if (rows0 >= d.keys || query >= d.queries || (d.causal && query + kPart <= rows0) ||
          (apart && document[0] >= d.key_position + rows0 + kRows)) {
        continue;
      }
      const int offset = buffer * Queries::kElements + part * Queries::kStep;
      float s[kM][kPart / 8][4], dp[kM][kPart / 8][4];
      k.template Times<Queries>(q_tiles + offset, s);
      v.template Times<Queries>(dout_tiles + offset, dp);
      WaitSums<Shape::kGroups, 1>(s);
      const bool masked =
          (d.causal && query < row0 + 16 * kM - 1) || (apart && document[kPart - 1] > position);
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int column = n * 8 + lane % 4 * 2 + j;
          // Queries past the end have zeros in q, dout and delta.
          const float base = Base(lse[column]);
          const int end_row = masked && d.causal ? query + column + 1 - row0 : kM * 16;
          const int begin_row = masked && apart ? document[column] - position : 0;
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int row = m * 16 + h * 8 + lane / 4, i = 2 * h + j;
              const bool seen = row < end_row && row >= begin_row;
              s[m][n][i] = seen ? Exp2(s[m][n][i] * scale2 - base) : 0.f;
            }
          }
        }
      }
      uint32_t p[kM][kPart / 16][4], ds[kM][kPart / 16][4];
      WaitSums<Shape::kGroups, 0>(dp);
#pragma unroll
      for (int n = 0; n < kPart / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float subtract = delta[n * 8 + lane % 4 * 2 + j];
#pragma unroll
          for (int m = 0; m < kM; ++m) {
#pragma unroll
            for (int i = j; i < 4; i += 2) dp[m][n][i] = s[m][n][i] * (dp[m][n][i] - subtract);
          }
        }
      }
      // No operand is computed while MMAs read others from registers: the compiler does not
      // reliably keep those.
      RoundScores<T>(s, p);
      if constexpr (Shape::kGroups) RoundScores<T>(dp, ds);
      AddGemm<Queries>(p, dout_tiles + offset, dv);
      if constexpr (!Shape::kGroups) RoundScores<T>(dp, ds);
      AddGemm<Queries>(ds, q_tiles + offset, dk);
      WaitSums<Shape::kGroups, 0>(dk);
      WaitSums<Shape::kGroups, 0>(dv);
    }
  }
  if constexpr (Shape::kGroups) __syncthreads();
  float factor[kM][2];
#pragma unroll
  for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = 1;
  StoreRows<Rows>(dv, factor, v_tile, own, d.dv.Head(b, at.head), d.dv.row_stride, row0, d.keys,
                  d.width);
#pragma unroll
  for (int m = 0; m < kM; ++m) factor[m][0] = factor[m][1] = d.scale;
  StoreRows<Rows>(dk, factor, k_tile, own, d.dk.Head(b, at.head), d.dk.row_stride, row0, d.keys,
                  d.width);
}

}  // namespace muster::kernels::cuda::flash

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_CUH_
