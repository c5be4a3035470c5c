#include "kernels/optimizer/optimizer.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(ClipCoefficient)
MUSTER_TWINS(PrepareStep)
MUSTER_TWINS(AdamW)
MUSTER_TWINS(SplitMaster)
MUSTER_TWINS(JoinMaster)

namespace {

// `lower` may be empty.
void CheckHalves(const Tensor& master, const Tensor& upper, const Tensor& lower) {
  CheckFp32(master);
  CHECK(upper.dtype() == DType::kBF16 && upper.contiguous() &&
        upper.elements() == master.elements())
      << "the upper half is " << upper.ToString() << " of " << master.ToString();
  if (lower.empty()) return;
  CHECK(lower.dtype() == DType::kU16 && lower.contiguous() && lower.elements() == master.elements())
      << "the lower half is " << lower.ToString() << " of " << master.ToString();
}

}  // namespace

void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars) {
  CheckFp32(square_sum);
  CheckFp32(norm);
  CHECK_GE(norm.elements(), 1);
  CHECK(scalars != nullptr);
  MUSTER_DISPATCH(ClipCoefficient, square_sum, clip_norm, norm, scalars);
}

void PrepareStep(Stream& stream, const PrepareStepArgs& args) {
  CheckFp32(args.values);
  CHECK_EQ(args.values.elements(), 2 * args.micro_batches + 1 + 2 * args.ranks);
  CHECK(args.state != nullptr && args.scalars != nullptr && args.outcome != nullptr);
  MUSTER_DISPATCH(PrepareStep, args);
}

void AdamW(Stream& stream, const AdamWArgs& args) {
  CheckSameFp32(args.gradient, args.m);
  CheckSameFp32(args.gradient, args.v);
  if (!args.lower.empty()) {
    CHECK(args.parameter.empty()) << "a master weight both whole and in halves";
    CheckHalves(args.gradient, args.copy, args.lower);
  } else {
    CheckSameFp32(args.parameter, args.gradient);
    if (!args.copy.empty()) {
      CHECK(IsActivation(args.copy.dtype()) && args.copy.dtype() != DType::kF32 &&
            args.copy.contiguous() && args.copy.elements() == args.parameter.elements())
          << "copy is " << args.copy.ToString() << " of " << args.parameter.ToString();
    }
  }
  CHECK(args.scalars != nullptr);
  MUSTER_DISPATCH(AdamW, args);
}

void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower) {
  CheckHalves(master, upper, lower);
  MUSTER_DISPATCH(SplitMaster, master, upper, lower);
}

void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master) {
  CHECK(!lower.empty());
  CheckHalves(master, upper, lower);
  MUSTER_DISPATCH(JoinMaster, upper, lower, master);
}

}  // namespace muster::kernels
