// Sums in a fixed order, for losses, gradient norms and gradients of several ranks.
// kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_OPTIMIZER_REDUCE_H_
#define MUSTER_KERNELS_OPTIMIZER_REDUCE_H_

#include <cstdint>
#include <vector>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// out[0] (+)= the sum of x, fp32.
void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate);
// out[0] (+)= the sum of squares of x, fp32, accumulated in double.
void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate);
// The same as a pair that keeps 48 bits: out[0] + out[1] in double is the sum, and out[0] is its
// fp32 rounding. So partial sums of ranks add up to the same total, however x was cut.
void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate);
// SumSquaresPair over several small tensors; on CUDA a block each.
void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate);
// out[0] + out[1] (+)= the sum of all numbers of `pairs` [n,2], fp32, accumulated in double.
void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate);
// How many pairs WeightGradient leaves a sum of squares in.
inline constexpr int64_t kSquareParts = 512;

// out[i] = the sum over parts of in[part * n + i], added in fp32 as one binary tree over the parts
// in order, ((0 1) (2 3)) .... in [parts * n] fp32, bf16 or fp16; out [n] fp32, or the dtype of in
// (rounded once).
void SumParts(Stream& stream, Tensor in, Tensor out);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_OPTIMIZER_REDUCE_H_
