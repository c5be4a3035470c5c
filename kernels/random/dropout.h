// Dropout (Srivastava et al., JMLR 2014). kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_RANDOM_DROPOUT_H_
#define MUSTER_KERNELS_RANDOM_DROPOUT_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// out = x * mask / (1 - probability), where an element of the mask is 0 with that probability and
// else 1.
//
// An element of the mask depends only on the seed, the site, the number of the sample in the order
// in which training takes samples, the token's position in it, and the column (dropout_mask.h:
// Philox4x32-10). So it is the same wherever the element is computed, on host and device, and is
// not stored: the same call on the gradient is the backward pass. Training takes no sample twice,
// so every step has its own masks. The sample's number is read from device memory, so that a
// recorded call (kernels/device/replay.h) draws a mask of its own each time it runs.
struct DropoutArgs {
  Tensor x;                // [R,C] act; C <= 2^18
  Tensor out;              // as x, which it may be
  double probability = 0;  // of being dropped, 0 to less than 1
  uint64_t seed = 0;
  int64_t site = 0;  // which dropout of the model this is, 0 to 2^16 - 1
  // [2] i32: the lower and the upper 32 bits of the first sample's number; the others follow.
  Tensor sample;
  // Row r is token first_row + r of those samples, which have S = `sequence` tokens each. Token t
  // of a sample has position positions[t] ([S] i32), or t where that is empty.
  int64_t sequence = 0;
  int64_t first_row = 0;
  Tensor positions = Tensor();
};
void Dropout(Stream& stream, const DropoutArgs& args);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_RANDOM_DROPOUT_H_
