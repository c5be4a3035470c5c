// Attention (FlashAttention-2, arXiv 2307.08691): softmax(q k^T * scale) v per head, in tiles and
// without the S x S matrix in memory. head_width.h says which head widths a device takes;
// kernels/README.md has the conventions of all ops.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// Query head h reads key/value head h / (H/G).
struct AttentionArgs {
  Tensor q;    // [B,S,H,D] act
  Tensor k;    // [B,S,G,D] act; without causal, its S may differ from q's
  Tensor v;    // as k
  Tensor out;  // as q
  // [B,H,S] fp32: the log of the softmax denominator, which backward needs.
  Tensor lse;
  // q, k, v and out have strides, so packed QKV needs no copy; their last dimension is dense.
  float scale = 0;  // 0: 1/sqrt(D)
  bool causal = true;
  // Packed sequences: a query attends to the keys of its own document alone. [B,S] i32, the
  // position at which each query's document begins, or empty. The first key has position
  // `key_position`, the others follow. Along S the values do not decrease. Without causal, a query
  // may have no key at all; then out = 0 and lse = -inf.
  Tensor documents = Tensor();
  int64_t key_position = 0;
};
void AttentionForward(Stream& stream, const AttentionArgs& args);

struct AttentionBackwardArgs {
  AttentionArgs forward;
  Tensor dout;        // as out
  Tensor dq, dk, dv;  // as q, k, v; written
  Tensor delta;       // [B,H,S] fp32 scratch: row sums of dout * out
  // False: on CUDA dq may be summed in any order, which is faster from some thousand tokens on.
  bool deterministic = true;
};
void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args);

// Combines attention over two disjoint sets of keys into attention over their union:
//   lse' = log(exp(lse) + exp(partial_lse)),
//   out = out exp(lse - lse') + partial_out exp(partial_lse - lse'), lse = lse'.
// In fp32; a set without keys has lse = -inf. AttentionBackward over one of the sets, given the
// merged out and lse, yields that set's contribution to dq, and its dk and dv.
struct AttentionMergeArgs {
  Tensor out;          // [B,S,H,D] act, updated
  Tensor lse;          // [B,H,S] fp32, updated
  Tensor partial_out;  // [B,S,H,D] act, not necessarily the dtype of out
  Tensor partial_lse;  // [B,H,S] fp32
};
void AttentionMerge(Stream& stream, const AttentionMergeArgs& args);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_H_
