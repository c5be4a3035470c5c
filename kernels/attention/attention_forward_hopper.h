// Attention forward by our own kernel for Hopper: 64-wide heads, bf16 and fp16, with or without
// documents. The bits repeat.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_H_

#include "kernels/attention/attention.h"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// False where this kernel does not serve, and then nothing was enqueued: a device or build other
// than Hopper's, fp32, heads that are not 64 wide, rows that do not start at multiples of 16 bytes,
// a scale that is not positive, 2^31 tiles or more.
bool HopperAttentionForward(CudaStream& stream, const AttentionArgs& args);

// Whether it is at least as fast as cuDNN's graph where it serves, as measured in
// docs/decisions/0008-which-attention-kernel-runs.md.
bool HopperAttentionForwardIsFaster(const AttentionArgs& args);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_H_
