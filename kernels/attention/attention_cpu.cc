// Attention on the host, in tiles with an online softmax (FlashAttention-2, arXiv 2307.08691). The
// scores of a tile stay in the L2 cache.
//
// Forward: one task per (batch, head, block of queries). With s = scale q k^T of a tile, m the
// running row maximum, l the running denominator:
//   m' = max(m, max s), p = exp(s - m'), l = l exp(m - m') + sum p, out = out exp(m - m') + p v,
// at the end out /= l, lse = m + log l.
// Backward: one task per (batch, key/value head), which owns dk, dv and the dq of its query heads,
// so that no two threads add to the same element:
//   p = exp(s - lse), dv += p^T dout, dp = dout v^T, ds = scale p (dp - delta), dk += ds^T q,
//   dq += ds k, where delta = row sums of dout * out.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "base/check.h"
#include "kernels/attention/attention.h"
#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/gemm/gemm_cpu.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kBlock = 128;  // queries and keys of a tile

// One head: rows [0, sequence) of D elements, with a stride.
struct Head {
  float* data;
  int64_t stride;

  Head(const Tensor& x, int64_t batch, int64_t head)
      : data(x.f32() + batch * x.stride(0) + head * x.stride(2)), stride(x.stride(1)) {}
  float* Row(int64_t row) const { return data + row * stride; }
};

float ScaleOf(const AttentionArgs& args) {
  return args.scale != 0 ? args.scale : 1.0f / std::sqrt(static_cast<float>(args.q.dim(3)));
}

// Keys [begin, end) of the block at `key0` that a query attends to; begin >= end: none.
struct ValidKeys {
  int64_t begin = 0, end = 0;

  ValidKeys(const AttentionArgs& args, int64_t batch, int64_t query, int64_t key0, int64_t keys)
      : begin(std::clamp<int64_t>(FirstKey(args, batch, query) - key0, 0, keys)),
        end(args.causal ? std::clamp<int64_t>(query + 1 - key0, 0, keys) : keys) {}

  // The index of the first key of a query's document.
  static int64_t FirstKey(const AttentionArgs& args, int64_t batch, int64_t query) {
    if (args.documents.empty()) return 0;
    return args.documents.as<int32_t>()[batch * args.documents.stride(0) + query] -
           args.key_position;
  }
};

// Where the first block begins that holds a key seen by any query from `query0` on.
int64_t FirstBlock(const AttentionArgs& args, int64_t batch, int64_t query0) {
  if (args.documents.empty()) return 0;
  // Documents begin in the order of their tokens.
  return std::max<int64_t>(0, ValidKeys::FirstKey(args, batch, query0)) / kBlock * kBlock;
}

void ForwardBlock(const AttentionArgs& args, int64_t batch, int64_t head, int64_t query0) {
  const Loops& loops = ChooseLoops();
  const int64_t sequence = args.q.dim(1), heads = args.q.dim(2), width = args.q.dim(3);
  const int64_t key_count = args.k.dim(1), key_head = head / (heads / args.k.dim(2));
  const Head q(args.q, batch, head), k(args.k, batch, key_head), v(args.v, batch, key_head),
      out(args.out, batch, head);
  const int64_t queries = std::min(kBlock, sequence - query0);
  const int64_t key_end = args.causal ? std::min(key_count, query0 + queries) : key_count;
  const float scale = ScaleOf(args);
  float* scores = ThreadScratch(kBlock * kBlock);
  float m[kBlock], l[kBlock];
  std::fill(m, m + queries, -std::numeric_limits<float>::infinity());
  std::fill(l, l + queries, 0.0f);
  const int64_t key_begin = FirstBlock(args, batch, query0);
  for (int64_t key0 = key_begin; key0 < key_end; key0 += kBlock) {
    const int64_t keys = std::min(kBlock, key_end - key0);
    Gemm(queries, keys, width, {q.Row(query0), q.stride}, {k.Row(key0), k.stride, Transpose::kYes},
         0, scores, kBlock);
    for (int64_t row = 0; row < queries; ++row) {
      const ValidKeys valid(args, batch, query0 + row, key0, keys);
      float* s = scores + row * kBlock;
      if (valid.begin >= valid.end) {
        std::fill(s, s + keys, 0.0f);
        continue;
      }
      std::fill(s, s + valid.begin, 0.0f);
      const float factor = loops.softmax_block(keys - valid.begin, valid.end - valid.begin, scale,
                                               s + valid.begin, &m[row], &l[row]);
      if (key0 > key_begin) loops.scale(width, factor, out.Row(query0 + row));
    }
    Gemm(queries, width, keys, {scores, kBlock}, {v.Row(key0), v.stride}, key0 > key_begin ? 1 : 0,
         out.Row(query0), out.stride);
  }
  float* lse = args.lse.f32() + (batch * heads + head) * sequence + query0;
  for (int64_t row = 0; row < queries; ++row) {
    if (l[row] == 0) {  // no key
      std::fill(out.Row(query0 + row), out.Row(query0 + row) + width, 0.0f);
      lse[row] = -std::numeric_limits<float>::infinity();
      continue;
    }
    loops.scale(width, 1.0f / l[row], out.Row(query0 + row));
    lse[row] = m[row] + std::log(l[row]);
  }
}

// The tile of `keys` keys from key0 and `queries` queries from query0 of one query head.
struct BackwardTile {
  int64_t query0, queries, key0, keys;
  bool first_keys;     // dq is overwritten, not added to
  bool first_queries;  // dk and dv are overwritten, not added to
};

void BackwardOfTile(const AttentionBackwardArgs& args, int64_t batch, int64_t head,
                    const BackwardTile& tile) {
  const Loops& loops = ChooseLoops();
  const AttentionArgs& forward = args.forward;
  const int64_t heads = forward.q.dim(2), sequence = forward.q.dim(1), width = forward.q.dim(3);
  const int64_t key_head = head / (heads / forward.k.dim(2));
  const Head q(forward.q, batch, head), k(forward.k, batch, key_head),
      v(forward.v, batch, key_head), dout(args.dout, batch, head), dq(args.dq, batch, head),
      dk(args.dk, batch, key_head), dv(args.dv, batch, key_head);
  const float* lse = forward.lse.f32() + (batch * heads + head) * sequence + tile.query0;
  const float* delta = args.delta.f32() + (batch * heads + head) * sequence + tile.query0;
  const float scale = ScaleOf(forward);
  float* p = ThreadScratch(2 * kBlock * kBlock);
  float* ds = p + kBlock * kBlock;

  Gemm(tile.queries, tile.keys, width, {q.Row(tile.query0), q.stride},
       {k.Row(tile.key0), k.stride, Transpose::kYes}, 0, p, kBlock);
  for (int64_t row = 0; row < tile.queries; ++row) {
    const ValidKeys valid(forward, batch, tile.query0 + row, tile.key0, tile.keys);
    float* s = p + row * kBlock;
    if (valid.begin >= valid.end) {
      std::fill(s, s + tile.keys, 0.0f);
      continue;
    }
    std::fill(s, s + valid.begin, 0.0f);
    loops.softmax_probabilities(tile.keys - valid.begin, valid.end - valid.begin, scale, lse[row],
                                s + valid.begin, s + valid.begin);
  }
  const float keep = tile.first_queries ? 0 : 1;
  Gemm(tile.keys, width, tile.queries, {p, kBlock, Transpose::kYes},
       {dout.Row(tile.query0), dout.stride}, keep, dv.Row(tile.key0), dv.stride);
  Gemm(tile.queries, tile.keys, width, {dout.Row(tile.query0), dout.stride},
       {v.Row(tile.key0), v.stride, Transpose::kYes}, 0, ds, kBlock);
  for (int64_t row = 0; row < tile.queries; ++row) {
    loops.softmax_backward(tile.keys, scale, delta[row], p + row * kBlock, ds + row * kBlock,
                           ds + row * kBlock);
  }
  Gemm(tile.keys, width, tile.queries, {ds, kBlock, Transpose::kYes},
       {q.Row(tile.query0), q.stride}, keep, dk.Row(tile.key0), dk.stride);
  Gemm(tile.queries, width, tile.keys, {ds, kBlock}, {k.Row(tile.key0), k.stride},
       tile.first_keys ? 0 : 1, dq.Row(tile.query0), dq.stride);
}

void BackwardGroup(const AttentionBackwardArgs& args, int64_t batch, int64_t key_head) {
  const Loops& loops = ChooseLoops();
  const AttentionArgs& forward = args.forward;
  const int64_t sequence = forward.q.dim(1), heads = forward.q.dim(2), width = forward.q.dim(3);
  const int64_t key_count = forward.k.dim(1), group = heads / forward.k.dim(2);
  for (int64_t head = key_head * group; head < (key_head + 1) * group; ++head) {
    const Head out(forward.out, batch, head), dout(args.dout, batch, head);
    float* delta = args.delta.f32() + (batch * heads + head) * sequence;
    for (int64_t row = 0; row < sequence; ++row) {
      delta[row] = loops.dot(width, out.Row(row), dout.Row(row));
    }
    for (int64_t key0 = 0; key0 < key_count; key0 += kBlock) {
      const int64_t query_begin = forward.causal ? key0 : 0;
      for (int64_t query0 = query_begin; query0 < sequence; query0 += kBlock) {
        const int64_t queries = std::min(kBlock, sequence - query0);
        // Tiles in which no query sees a key are skipped, except the first ones, which write zeros.
        if (key0 > 0 && query0 > query_begin && key0 < FirstBlock(forward, batch, query0)) {
          continue;
        }
        BackwardOfTile(args, batch, head,
                       {.query0 = query0,
                        .queries = queries,
                        .key0 = key0,
                        .keys = std::min(kBlock, key_count - key0),
                        .first_keys = key0 == 0,
                        .first_queries = head == key_head * group && query0 == query_begin});
      }
    }
  }
}

}  // namespace

void AttentionForward(Stream& stream, const AttentionArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const SingleThreadedScope scope;
    const int64_t batch = args.q.dim(0), sequence = args.q.dim(1), heads = args.q.dim(2);
    const int64_t blocks = (sequence + kBlock - 1) / kBlock;
    pool.Run(batch * heads * blocks, [&](int64_t task) {
      // The last blocks of queries see the most keys, so they start first.
      const int64_t block = blocks - 1 - task / (batch * heads);
      const int64_t head = task % (batch * heads);
      ForwardBlock(args, head / heads, head % heads, block * kBlock);
    });
  });
}

void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args) {
  EnqueueOnHost(stream, [args](ThreadPool& pool) {
    const SingleThreadedScope scope;
    const int64_t key_heads = args.forward.k.dim(2);
    pool.Run(args.forward.k.dim(0) * key_heads,
             [&](int64_t task) { BackwardGroup(args, task / key_heads, task % key_heads); });
  });
}

}  // namespace muster::kernels::cpu
