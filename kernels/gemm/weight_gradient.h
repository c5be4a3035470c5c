// Gradients of weights with their sum of squares, and the rest of a global norm: a gradient that
// nobody changes once it is computed need not be read again for its norm. Ops as those of ops.h,
// whose conventions hold.
#ifndef MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_H_
#define MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_H_

#include <cstdint>
#include <vector>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// Pairs that a sum of squares is left in.
inline constexpr int64_t kSquareParts = 512;

// dw += dy^T x, dbias += column sums of dy: LinearBackward without `dx`. And, where the fastest way
// to compute this shape on the device leaves it, the sum of squares of dw as it is afterwards, in
// pairs as of SumSquaresPair that SumPairs adds up. Then *left is true, and else `squares` is not
// touched: who wants the sum reads dw, and that its way saves this counts for the one that leaves
// it. On CUDA ways are measured at the first call and kept in the plan cache; the host's is always
// the same. Repeated calls give the same bits.
struct WeightGradientArgs {
  Tensor dy;       // [T,N] act
  Tensor x;        // [T,K] act
  Tensor dw;       // [N,K] fp32 +=
  Tensor dbias;    // [N] fp32 += or empty
  Tensor squares;  // [kSquareParts,2] fp32
  // False: dw and dbias are overwritten.
  bool accumulate = true;
};
void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* left);

// out[0] + out[1] (+)= the sum of all numbers of `pairs` [n,2], fp32, in a fixed order, in double.
void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate);
// SumSquaresPair over several small tensors, on CUDA a block each.
void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate);

// The twins, as in ops_cpu.h and ops_cuda.h.
namespace cpu {
void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* left);
void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate);
void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate);
}  // namespace cpu
namespace cuda {
void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* left);
void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate);
void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate);
}  // namespace cuda

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_GEMM_WEIGHT_GRADIENT_H_
