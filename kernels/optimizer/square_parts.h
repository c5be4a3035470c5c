// The sum of squares of a tensor in parts (weight_gradient.h), in a pass of its own.
#ifndef MUSTER_KERNELS_OPTIMIZER_SQUARE_PARTS_H_
#define MUSTER_KERNELS_OPTIMIZER_SQUARE_PARTS_H_

#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// x fp32, squares [kSquareParts,2] fp32, written.
void SquareParts(CudaStream& stream, const Tensor& x, const Tensor& squares);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_OPTIMIZER_SQUARE_PARTS_H_
