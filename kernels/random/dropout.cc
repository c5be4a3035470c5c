#include "kernels/random/dropout.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/random/dropout_mask.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(Dropout)

void Dropout(Stream& stream, const DropoutArgs& args) {
  const Tensor& x = args.x;
  CHECK(x.rank() == 2 && IsActivation(x.dtype()) && x.contiguous()) << x.ToString();
  CheckIs("out", args.out, x.dtype(), {x.dim(0), x.dim(1)});
  CHECK(args.probability >= 0 && args.probability < 1) << args.probability;
  CHECK(args.site >= 0 && args.site < DropoutMask::kSites) << args.site;
  CHECK_LE(x.dim(1), DropoutMask::kColumns);
  CheckIs("sample", args.sample, DType::kI32, {2});
  CHECK(args.sequence > 0 && args.first_row >= 0) << args.sequence << ", " << args.first_row;
  CheckIsOrEmpty("positions", args.positions, DType::kI32, {args.sequence});
  MUSTER_DISPATCH(Dropout, args);
}

}  // namespace muster::kernels
