#include "kernels/optimizer/reduce.h"

#include <cstdint>
#include <vector>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(Sum)
MUSTER_TWINS(SumSquares)
// SumSquaresPair is overloaded, so MUSTER_TWINS cannot tell which one is meant.
namespace cpu {
void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate);
void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate);
}  // namespace cpu
namespace cuda {
void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate);
void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate);
}  // namespace cuda
MUSTER_TWINS(SumPairs)
MUSTER_TWINS(SumParts)

namespace {

// `out` begins with the sum, which is one number, or is a pair.
void CheckSum(const Tensor& x, const Tensor& out) {
  CheckFp32(x);
  CheckFp32(out);
  CHECK_GE(out.elements(), 1);
}

void CheckPair(const Tensor& x, const Tensor& out) {
  CheckSum(x, out);
  CHECK_EQ(out.elements(), 2);
}

}  // namespace

void Sum(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  CheckSum(x, out);
  MUSTER_DISPATCH(Sum, x, out, accumulate);
}

void SumSquares(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  CheckSum(x, out);
  MUSTER_DISPATCH(SumSquares, x, out, accumulate);
}

void SumSquaresPair(Stream& stream, Tensor x, Tensor out, bool accumulate) {
  CheckPair(x, out);
  MUSTER_DISPATCH(SumSquaresPair, x, out, accumulate);
}

void SumSquaresPair(Stream& stream, const std::vector<Tensor>& of, Tensor out, bool accumulate) {
  for (const Tensor& x : of) CheckPair(x, out);
  MUSTER_DISPATCH(SumSquaresPair, of, out, accumulate);
}

void SumPairs(Stream& stream, Tensor pairs, Tensor out, bool accumulate) {
  CheckPair(pairs, out);
  MUSTER_DISPATCH(SumPairs, pairs, out, accumulate);
}

void SumParts(Stream& stream, Tensor in, Tensor out) {
  CHECK(out.dtype() == DType::kF32 || out.dtype() == in.dtype()) << out.ToString();
  CHECK(IsActivation(in.dtype()) && in.contiguous() && out.contiguous() && out.elements() > 0 &&
        in.elements() % out.elements() == 0)
      << in.ToString() << " in parts of " << out.ToString();
  MUSTER_DISPATCH(SumParts, in, out);
}

}  // namespace muster::kernels
