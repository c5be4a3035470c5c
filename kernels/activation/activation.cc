#include "kernels/activation/activation.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(GeluForward)
MUSTER_TWINS(GeluBackward)
MUSTER_TWINS(Relu2Forward)
MUSTER_TWINS(Relu2Backward)
MUSTER_TWINS(SwigluForward)
MUSTER_TWINS(SwigluBackward)

namespace {

void CheckSame(const Tensor& x, const Tensor& y) {
  CHECK(IsActivation(x.dtype()) && x.dtype() == y.dtype() && x.elements() == y.elements() &&
        x.contiguous() && y.contiguous())
      << x.ToString() << " to " << y.ToString();
}

void CheckSwiglu(const Tensor& packed, const Tensor& y) {
  CHECK(y.rank() == 2 && IsActivation(y.dtype())) << y.ToString();
  CheckIs("y", y, y.dtype(), {y.dim(0), y.dim(1)});
  CheckIs("packed", packed, y.dtype(), {y.dim(0), 2 * y.dim(1)});
}

}  // namespace

void GeluForward(Stream& stream, Tensor x, Tensor y) {
  CheckSame(x, y);
  MUSTER_DISPATCH(GeluForward, x, y);
}

void GeluBackward(Stream& stream, Tensor x, Tensor dy, Tensor dx) {
  CheckSame(x, dy);
  CheckSame(x, dx);
  MUSTER_DISPATCH(GeluBackward, x, dy, dx);
}

void Relu2Forward(Stream& stream, Tensor x, Tensor y) {
  CheckSame(x, y);
  MUSTER_DISPATCH(Relu2Forward, x, y);
}

void Relu2Backward(Stream& stream, Tensor x, Tensor dy, Tensor dx, Tensor y) {
  CheckSame(x, dy);
  CheckSame(x, dx);
  if (!y.empty()) CheckSame(x, y);
  MUSTER_DISPATCH(Relu2Backward, x, dy, dx, y);
}

void SwigluForward(Stream& stream, Tensor packed, Tensor y) {
  CheckSwiglu(packed, y);
  MUSTER_DISPATCH(SwigluForward, packed, y);
}

void SwigluBackward(Stream& stream, Tensor packed, Tensor dy, Tensor d_packed, Tensor y) {
  CheckSwiglu(packed, dy);
  CheckSwiglu(d_packed, dy);
  if (!y.empty()) CheckSwiglu(packed, y);
  MUSTER_DISPATCH(SwigluBackward, packed, dy, d_packed, y);
}

}  // namespace muster::kernels
