// The sum of squares that WeightGradient leaves (gemm/weight_gradient.h), as a pass of its own.
#ifndef MUSTER_KERNELS_OPTIMIZER_SQUARE_PARTS_H_
#define MUSTER_KERNELS_OPTIMIZER_SQUARE_PARTS_H_

#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// x fp32; squares [kSquareParts,2] fp32, written.
void SquareParts(CudaStream& stream, const Tensor& x, const Tensor& squares);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_OPTIMIZER_SQUARE_PARTS_H_
