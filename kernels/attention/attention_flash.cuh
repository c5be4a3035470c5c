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

#include "kernels/attention/attention_flash_tiles.cuh"

namespace muster::kernels::cuda::flash {

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
