#include "kernels/memory/memory.h"

#include <cstdint>
#include <vector>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(Zero)
MUSTER_TWINS(ZeroAll)
MUSTER_TWINS(Copy)
MUSTER_TWINS(Cast)
MUSTER_TWINS(Axpy)
MUSTER_TWINS(Scale)
MUSTER_TWINS(CopyStrided)
MUSTER_TWINS(Add)

void Zero(Stream& stream, Tensor out) {
  CHECK(out.contiguous()) << out.ToString();
  MUSTER_DISPATCH(Zero, out);
}

void ZeroAll(Stream& stream, const std::vector<Tensor>& outs) {
  for (const Tensor& out : outs) {
    CHECK(out.contiguous() && out.dtype() == DType::kF32) << out.ToString();
  }
  MUSTER_DISPATCH(ZeroAll, outs);
}

void Copy(Stream& stream, Tensor from, Tensor to) {
  CHECK(from.dtype() == to.dtype() && from.elements() == to.elements() && from.contiguous() &&
        to.contiguous())
      << from.ToString() << " to " << to.ToString();
  MUSTER_DISPATCH(Copy, from, to);
}

void Cast(Stream& stream, Tensor from, Tensor to) {
  CHECK(IsActivation(from.dtype()) && IsActivation(to.dtype()) &&
        from.elements() == to.elements() && from.contiguous() && to.contiguous())
      << from.ToString() << " to " << to.ToString();
  MUSTER_DISPATCH(Cast, from, to);
}

void Axpy(Stream& stream, float alpha, Tensor x, Tensor y) {
  CheckSameFp32(x, y);
  MUSTER_DISPATCH(Axpy, alpha, x, y);
}

void Scale(Stream& stream, float alpha, Tensor x) {
  CheckFp32(x);
  MUSTER_DISPATCH(Scale, alpha, x);
}

void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate) {
  bool same = IsActivation(from.dtype()) && IsActivation(to.dtype()) && from.rank() == to.rank();
  for (int i = 0; same && i < from.rank(); ++i) same = from.dim(i) == to.dim(i);
  CHECK(same) << from.ToString() << " to " << to.ToString();
  MUSTER_DISPATCH(CopyStrided, from, to, accumulate);
}

void Add(Stream& stream, Tensor a, Tensor b, Tensor out) {
  CHECK(IsActivation(a.dtype()) && a.dtype() == b.dtype() && a.dtype() == out.dtype() &&
        a.elements() == b.elements() && a.elements() == out.elements() && a.contiguous() &&
        b.contiguous() && out.contiguous())
      << a.ToString() << " + " << b.ToString() << " to " << out.ToString();
  MUSTER_DISPATCH(Add, a, b, out);
}

}  // namespace muster::kernels
