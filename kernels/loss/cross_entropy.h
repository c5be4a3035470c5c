// Cross-entropy with its gradient, over a whole vocabulary and over one that ranks share.
// kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_LOSS_CROSS_ENTROPY_H_
#define MUSTER_KERNELS_LOSS_CROSS_ENTROPY_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// losses[t] = logsumexp(z[t, :vocab]) - z[t, target], or 0 where target < 0 (masked). With
// `write_gradient` the logits are overwritten by scale * (softmax - onehot), which is 0 where
// masked and in the padding. A target of vocab or above ends the process on the host and gives a
// loss of NaN on CUDA.
struct CrossEntropyArgs {
  Tensor logits;      // [T,V] act
  Tensor targets;     // [T] i32, < 0 = masked
  Tensor losses;      // [T] fp32
  int64_t vocab = 0;  // columns without padding, <= V
  float scale = 1;    // 1 / unmasked tokens of the global batch
  // Device memory, or null: another factor of the gradient, the dynamic loss scale of fp16.
  const float* loss_scale = nullptr;
  bool write_gradient = true;
};
void CrossEntropy(Stream& stream, const CrossEntropyArgs& args);

// The same over a vocabulary whose columns are sharded over ranks. First, every rank computes the
// statistics of its own columns: stats[t] = (max of z, sum of exp(z - max), z[t, target] or 0 where
// the target is another rank's). The ranks all-gather them. Then the merge gives every rank the
// losses, in the same bits, and the gradient of its own columns.
struct CrossEntropyStatsArgs {
  Tensor logits;      // [T,V] act, read
  Tensor targets;     // [T] i32 of the whole vocabulary, < 0 = masked
  int64_t first = 0;  // the token that column 0 belongs to
  int64_t vocab = 0;  // columns without padding, <= V
  Tensor stats;       // [T,3] fp32, written
};
void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args);

struct CrossEntropyMergeArgs {
  Tensor logits;      // [T,V] act; overwritten by the gradient, as in CrossEntropy
  Tensor targets;     // [T] i32 of the whole vocabulary, < 0 = masked
  int64_t first = 0;  // as above
  int64_t vocab = 0;
  Tensor stats;   // [ranks,T,3] fp32, in the order of the ranks
  Tensor losses;  // [T] fp32
  float scale = 1;
  const float* loss_scale = nullptr;
  bool write_gradient = true;
};
void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_LOSS_CROSS_ENTROPY_H_
