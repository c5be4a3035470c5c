// Attention by our own kernels on the tensor cores: bf16 and fp16, with documents or without, in
// the same bits every time and without memory that grows with the square of the sequence.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_H_

#include "kernels/device/device_cuda.h"
#include "kernels/ops.h"

namespace muster::kernels::cuda {

// False for what these kernels do not take, and then nothing was enqueued: fp32, heads that are
// wider than 128 or no multiple of 8, rows that do not start at multiples of 16 bytes, a scale that
// is not positive, a device with too little shared memory. Any `deterministic`: the order is fixed.
bool FlashForward(CudaStream& stream, const AttentionArgs& args);
bool FlashBackward(CudaStream& stream, const AttentionBackwardArgs& args);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_H_
