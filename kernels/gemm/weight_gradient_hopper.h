// Our GEMM for weight gradients on Hopper's tensor cores, with their sum of squares. It is for
// shapes where cuBLASLt's GEMM and a pass over its output for the squares take longer; the caller
// measures that (LinearPlans::RunFastest).
#ifndef MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_HOPPER_H_
#define MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_HOPPER_H_

#include "absl/status/status.h"
#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// dw (+)= dy^T x.
struct HopperWeightGradient {
  Tensor dy;                // [T,N] bf16 or fp16
  Tensor x;                 // [T,K] as dy
  Tensor dw;                // [N,K] fp32
  bool accumulate = false;  // add to what dw holds
  Tensor squares;           // [kSquareParts,2] fp32, written, or empty (weight_gradient.h)
};

// Whether RunHopperWeightGradient can run this: the device and the build are Hopper's, the dtypes
// have 16 bits, and every row of dy and x starts at a multiple of 16 bytes.
bool HopperWeightGradientServes(const CudaDevice& device, const HopperWeightGradient& gradient);

// The same bits in every run. Requires: HopperWeightGradientServes.
absl::Status RunHopperWeightGradient(CudaStream& stream, const HopperWeightGradient& gradient);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_HOPPER_H_
