// Attention of one query per sample over all keys so far: a step of decoding.
// kernels/README.md has the conventions of all ops.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_DECODE_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_DECODE_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// On CUDA the keys of a head are shared out among blocks, so many to each.
constexpr int64_t kAttentionDecodeKeys = 256;

// Query head h reads key/value head h / (H/G). On a CUDA device D is at most kCudaHeadWidthMax.
struct AttentionDecodeArgs {
  Tensor q;        // [B,1,H,D] act
  Tensor k;        // [B,L,G,D] act, L >= 1: all of them are seen
  Tensor v;        // as k
  Tensor out;      // as q
  Tensor partial;  // fp32 scratch, AttentionDecodePartials() elements at least
  // q, k, v and out have strides; their last dimension is dense.
  float scale = 0;  // 0: 1/sqrt(D)
};
void AttentionDecode(Stream& stream, const AttentionDecodeArgs& args);

constexpr int64_t AttentionDecodePartials(int64_t batch, int64_t heads, int64_t keys,
                                          int64_t width) {
  const int64_t splits = (keys + kAttentionDecodeKeys - 1) / kAttentionDecodeKeys;
  return batch * heads * splits * (width + 2);
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_DECODE_H_
