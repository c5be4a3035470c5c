// Attention's backward in any order by kernels of our own for Hopper, heads of 64.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_H_

#include "kernels/device/device_cuda.h"
#include "kernels/ops.h"

namespace muster::kernels::cuda {

// False for what it does not take, and then nothing was enqueued: a fixed order, documents, another
// width, fp32, rows that do not start at multiples of 16 bytes, a device or build that is not
// Hopper's. Faster than cuDNN's at every length measured (docs/benchmarks/h200-kernels.md), by
// itself: attention.cu says who asks for it.
bool HopperAttentionBackward(CudaStream& stream, const AttentionBackwardArgs& args);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_H_
