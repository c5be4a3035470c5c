// Attention backward by our own kernels for Hopper: 64-wide heads, dq summed in any order.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_H_

#include "kernels/attention/attention.h"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// False where these kernels do not serve, and then nothing was enqueued: `deterministic`,
// documents, another head width, fp32, rows that do not start at multiples of 16 bytes, a device or
// build other than Hopper's. Measured on its own it is faster than cuDNN's at every length
// (docs/decisions/0008-which-attention-kernel-runs.md); attention.cu says when it runs.
bool HopperAttentionBackward(CudaStream& stream, const AttentionBackwardArgs& args);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_BACKWARD_HOPPER_H_
