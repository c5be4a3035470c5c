// The state-space scan by wgmma and TMA (sm_90a), for bf16 and fp16, head widths and states of
// multiples of 8 up to 256 (SsdIsFused), and chunks of 128 positions.
#ifndef MUSTER_KERNELS_SSM_SSD_HOPPER_H_
#define MUSTER_KERNELS_SSM_SSD_HOPPER_H_

#include "kernels/device/device_cuda.h"
#include "kernels/ssm/ssd_segments.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cuda {

// False: not served, and nothing has been enqueued.
bool HopperSsdForward(CudaStream& stream, const SsdArgs& args, SsdPart part);
bool HopperSsdBackward(CudaStream& stream, const SsdBackwardArgs& args, SsdPart part);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_SSM_SSD_HOPPER_H_
