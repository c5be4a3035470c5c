// Device memory that attention's backward takes beside its arguments, for planning.
#ifndef MUSTER_KERNELS_ATTENTION_WORKSPACE_H_
#define MUSTER_KERNELS_ATTENTION_WORKSPACE_H_

#include <cstdint>

namespace muster::kernels {

// Where a backward would take more, its samples go through in parts. Parts fill the chip less well:
// on an H200, four in the place of one take a tenth more time.
constexpr int64_t kAttentionWorkspaceBytesMax = int64_t{2} << 30;

// Of cuDNN's graphs in 16 bits, as cuDNN 9.19 asks on Hopper: the gradient of the scores, or where
// any order will do an fp32 sum of dq; row sums; dk and dv of every query head where heads share
// them. Requires: batch > 0.
constexpr int64_t AttentionWorkspaceBytes(int64_t batch, int64_t heads, int64_t key_heads,
                                          int64_t sequence, int64_t width, bool deterministic) {
  const auto bytes = [=](int64_t samples) {
    const int64_t rows = samples * heads * sequence;
    return rows * (deterministic ? 2 * sequence : 4 * width) + rows * 4 +
           (key_heads < heads ? rows * width * 4 : 0);
  };
  while (batch > 1 && bytes(batch) > kAttentionWorkspaceBytesMax) batch -= batch / 2;
  return bytes(batch);
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ATTENTION_WORKSPACE_H_
