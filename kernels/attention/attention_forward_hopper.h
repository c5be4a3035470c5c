// Attention forward by a kernel of our own for Hopper: heads of 64, bf16 and fp16, with documents
// or without, in the same bits every time.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_H_

#include "kernels/device/device_cuda.h"
#include "kernels/ops.h"

namespace muster::kernels::cuda {

// False for what this kernel does not take, and then nothing was enqueued: another device or build
// than Hopper's, fp32, heads that are not 64 wide, rows that do not start at multiples of 16 bytes,
// a scale that is not positive, 2^31 tiles or more.
bool HopperAttentionForward(CudaStream& stream, const AttentionArgs& args);

// Whether it is at least as fast as cuDNN's graph where it serves. Measured:
// docs/benchmarks/h200-kernels.md.
bool HopperAttentionForwardIsFaster(const AttentionArgs& args);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FORWARD_HOPPER_H_
