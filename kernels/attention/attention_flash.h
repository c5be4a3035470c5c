// Attention by our own kernels on the tensor cores: bf16 and fp16, with or without documents. The
// bits repeat, and no memory grows with the square of the sequence.
#ifndef MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_H_
#define MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_H_

#include "kernels/attention/attention.h"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// False where these kernels do not serve, and then nothing was enqueued: fp32, head widths that are
// not for the tensor cores (head_width.h), rows that do not start at multiples of 16 bytes, a scale
// that is not positive, a device with too little shared memory. Their order is fixed, whatever
// `deterministic` is.
bool FlashForward(CudaStream& stream, const AttentionArgs& args);
bool FlashBackward(CudaStream& stream, const AttentionBackwardArgs& args);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_ATTENTION_ATTENTION_FLASH_H_
