// What the calls for segments of a sequence (ssm.h) add to the CUDA kernels of the scan, whichever
// of these run.
#ifndef MUSTER_KERNELS_SSM_SSD_SEGMENTS_H_
#define MUSTER_KERNELS_SSM_SSD_SEGMENTS_H_

#include "kernels/device/device_cuda.h"
#include "kernels/ssm/ssm.h"

namespace muster::kernels::cuda {

// Which kernels of a direction run: those of the states, those that read them, or all.
enum class SsdPart { kWhole, kStates, kRest };

// Writes args.decay.
void SsdDecays(CudaStream& stream, const SsdArgs& args);
// Adds to `states`, stored in front of chunks, what `end` [B,H,P,N] in front of the first leaves of
// itself; with `reverse`, to gradients stored behind chunks what the one behind the last does.
void SsdCorrect(CudaStream& stream, const SsdArgs& args, const Tensor& end, bool reverse,
                const Tensor& states);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_SSM_SSD_SEGMENTS_H_
