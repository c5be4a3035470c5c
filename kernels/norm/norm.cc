#include "kernels/norm/norm.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(LayerNormForward)
MUSTER_TWINS(LayerNormBackward)
MUSTER_TWINS(RmsNormForward)
MUSTER_TWINS(RmsNormBackward)

namespace {

// The requirements that both norms share.
template <typename Args>
void CheckNormForward(const Args& args) {
  CHECK_EQ(args.residual.rank(), 2);
  const DType act = args.residual.dtype();
  const int64_t t = args.residual.dim(0), c = args.residual.dim(1);
  CheckIs("residual", args.residual, act, {t, c});
  CheckIsOrEmpty("branch", args.branch, act, {t, c});
  CheckIsOrEmpty("sum", args.sum, act, {t, c});
  CHECK(args.branch.empty() || !args.sum.empty()) << "a branch needs a sum to be written to";
  CheckIs("gamma", args.gamma, args.gamma.dtype(), {c});
  CheckIs("y", args.y, act, {t, c});
  CheckIs("rstd", args.rstd, DType::kF32, {t});
}

template <typename Args>
void CheckNormBackward(const Args& args) {
  CHECK_EQ(args.x.rank(), 2);
  const DType act = args.x.dtype();
  const int64_t t = args.x.dim(0), c = args.x.dim(1);
  CheckIs("x", args.x, act, {t, c});
  CheckIs("dy", args.dy, act, {t, c});
  CheckIs("gamma", args.gamma, args.gamma.dtype(), {c});
  CheckIs("rstd", args.rstd, DType::kF32, {t});
  CheckIs("dx", args.dx, act, {t, c});
  CheckIs("dgamma", args.dgamma, DType::kF32, {c});
  CHECK(args.dx.data() != args.dy.data() && args.dx.data() != args.x.data())
      << "dx is added to and cannot alias dy or x";
}

}  // namespace

void LayerNormForward(Stream& stream, const LayerNormForwardArgs& args) {
  CheckNormForward(args);
  CheckIs("beta", args.beta, args.gamma.dtype(), {args.residual.dim(1)});
  CheckIs("mean", args.mean, DType::kF32, {args.residual.dim(0)});
  MUSTER_DISPATCH(LayerNormForward, args);
}

void LayerNormBackward(Stream& stream, const LayerNormBackwardArgs& args) {
  CheckNormBackward(args);
  CheckIs("mean", args.mean, DType::kF32, {args.x.dim(0)});
  CheckIs("dbeta", args.dbeta, DType::kF32, {args.x.dim(1)});
  MUSTER_DISPATCH(LayerNormBackward, args);
}

void RmsNormForward(Stream& stream, const RmsNormForwardArgs& args) {
  CheckNormForward(args);
  MUSTER_DISPATCH(RmsNormForward, args);
}

void RmsNormBackward(Stream& stream, const RmsNormBackwardArgs& args) {
  CheckNormBackward(args);
  MUSTER_DISPATCH(RmsNormBackward, args);
}

}  // namespace muster::kernels
