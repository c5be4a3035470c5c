// Device memory that the backward of attention takes besides its arguments. Pure, for planning.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_WORKSPACE_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_WORKSPACE_H_

#include <cstdint>

namespace muster::kernels {

// Where a backward would take more, it runs on slices of the samples. Slices fill the chip less
// well: on an H200 four slices take a tenth more time than one call.
constexpr int64_t kAttentionWorkspaceBytesMax = int64_t{2} << 30;
// In a fixed order our own kernels, which need no workspace, run instead: for heads of up to this
// width, where they are as fast as slices; for wider ones where even the queries of one key head of
// one sample would take more than kAttentionWorkspaceBytesOfOneMax in cuDNN.
constexpr int64_t kAttentionOwnWidthMax = 64;
constexpr int64_t kAttentionWorkspaceBytesOfOneMax = int64_t{9} << 30;

// Queries of a tile of our own backward in any order, at width 64 (attention_backward_hopper.h).
constexpr int64_t kAttentionBackwardQueries = 64;
// Its workspace: dq in fp32, two statistics of each query, a counter. It runs on slices of the
// samples, too.
constexpr int64_t HopperAttentionBackwardBytes(int64_t batch, int64_t heads, int64_t queries) {
  const int64_t tiles = (queries + kAttentionBackwardQueries - 1) / kAttentionBackwardQueries;
  return batch * heads * tiles * kAttentionBackwardQueries * (64 + 2) * 4 + 16;
}

// The workspace of cuDNN's graphs in 16 bits, as cuDNN 9.19 asks for on Hopper: the gradient of the
// scores, or in any order an fp32 sum of dq; row sums; dk and dv of every query head where heads
// share them. `queries` and `keys` are tokens of a sample. For problems without documents; those
// with documents run on our own kernels. Requires: batch > 0.
constexpr int64_t AttentionWorkspaceBytes(int64_t batch, int64_t heads, int64_t key_heads,
                                          int64_t queries, int64_t keys, int64_t width,
                                          bool deterministic) {
  const int64_t group = heads / key_heads;
  const auto bytes = [=](int64_t samples, int64_t groups) {
    const int64_t rows = samples * groups * group * queries;
    return rows * (deterministic ? 2 * keys : 4 * width) + rows * 4 +
           (group > 1 ? samples * groups * group * keys * width * 4 : 0);
  };
  int64_t groups = key_heads;
  if (deterministic && width <= kAttentionOwnWidthMax &&
      bytes(batch, groups) > kAttentionWorkspaceBytesMax) {
    return 0;
  }
  while (batch > 1 && bytes(batch, groups) > kAttentionWorkspaceBytesMax) batch -= batch / 2;
  if (deterministic) {
    while (groups > 1 && bytes(batch, groups) > kAttentionWorkspaceBytesMax) groups -= groups / 2;
    if (bytes(batch, groups) > kAttentionWorkspaceBytesOfOneMax) return 0;
  }
  return bytes(batch, groups);
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_WORKSPACE_H_
