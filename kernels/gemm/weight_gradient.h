// Weight gradients together with their sum of squares: a gradient that does not change after it is
// computed need not be read again for the global norm. kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_H_
#define MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// dw += dy^T x, dbias += column sums of dy: LinearBackward without `dx`. If the fastest way to
// compute this shape on the device also yields the sum of squares of the resulting dw, it is
// written to `squares`, as pairs like those of SumSquaresPair, for SumPairs to add up, and
// *has_squares becomes true. Otherwise `squares` is not touched, *has_squares becomes false, and
// the caller reads dw for its norm; the measurement that chooses the way counts that pass. On CUDA
// the ways are measured at the first call for a shape and kept in the plan cache; the host has one
// way, with squares. Repeated calls give the same bits.
struct WeightGradientArgs {
  Tensor dy;       // [T,N] act
  Tensor x;        // [T,K] act
  Tensor dw;       // [N,K] fp32 +=
  Tensor dbias;    // [N] fp32 += or empty
  Tensor squares;  // [kSquareParts,2] fp32
  // False: dw and dbias are overwritten.
  bool accumulate = true;
};
void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* has_squares);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_H_
