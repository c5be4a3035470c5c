#include "kernels/gemm/linear.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(LinearForward)
MUSTER_TWINS(LinearBackward)
MUSTER_TWINS(WeightGradient)

namespace {

void CheckBackward(const LinearBackwardArgs& args) {
  CHECK(args.dy.rank() == 2 && args.w.rank() == 2);
  const DType act = args.dy.dtype();
  const int64_t t = args.dy.dim(0), k = args.w.dim(1), n = args.w.dim(0);
  CheckIs("dy", args.dy, act, {t, n});
  CheckIsOrEmpty("x", args.x, act, {t, k});
  CheckIs("w", args.w, act, {n, k});
  CheckIsOrEmpty("dx", args.dx, act, {t, k});
  CheckIsOrEmpty("pre", args.pre, act, {t, k});
  CheckIsOrEmpty("dw", args.dw, DType::kF32, {n, k});
  CHECK(!args.x.empty() || (args.dw.empty() && !args.recompute_x)) << "dw needs x";
  CHECK(!args.dw.empty() || (!args.dx.empty() && args.dbias.empty()))
      << "without dw, dx is computed, and no dbias";
  CheckIsOrEmpty("dbias", args.dbias, DType::kF32, {n});
  CheckIsOrEmpty("pre_dbias", args.pre_dbias, DType::kF32, {k});
  CHECK(!args.pre.empty() || args.pre_dbias.empty()) << "pre_dbias goes with pre";
  CHECK(args.activation == Epilogue::kGelu ||
        (args.activation == Epilogue::kRelu2 && args.pre_dbias.empty()))
      << "pre is that of GELU, or of squared ReLU without pre_dbias";
  CHECK(!args.recompute_x || !args.pre.empty() || !args.packed.empty())
      << "x is recomputed from pre or packed";
  CheckIsOrEmpty("packed", args.packed, act, {t, 2 * k});
  if (!args.packed.empty()) {
    CheckIs("d_packed", args.d_packed, act, {t, 2 * k});
    CHECK(args.pre.empty() && args.dw.empty() && !args.dx.empty())
        << "packed goes with dx alone, and without pre";
  }
  CHECK(args.pre.empty() || !args.dx.empty()) << "pre goes with dx";
  CHECK(!args.accumulate_dx || (args.dw.empty() && args.pre.empty() && args.packed.empty()))
      << "accumulate_dx goes with dx alone";
  if (!args.dx.empty()) {
    CHECK((args.dx.data() != args.x.data() || !args.packed.empty()) &&
          args.dx.data() != args.dy.data() && args.dx.data() != args.pre.data())
        << "dx cannot alias an input";
  }
}

}  // namespace

void LinearForward(Stream& stream, const LinearForwardArgs& args) {
  CHECK(args.x.rank() == 2 && args.w.rank() == 2);
  const DType act = args.x.dtype();
  const int64_t t = args.x.dim(0), k = args.x.dim(1), n = args.w.dim(0);
  CheckIs("x", args.x, act, {t, k});
  CheckIs("w", args.w, act, {n, k});
  CheckIsOrEmpty("bias", args.bias, act, {n});
  const bool swiglu = args.epilogue == Epilogue::kSwiglu;
  CHECK(!swiglu || n % 2 == 0) << n << " columns are not two halves of equal width";
  CheckIs("y", args.y, act, {t, swiglu ? n / 2 : n});
  const bool rotary = args.epilogue == Epilogue::kRotary;
  CHECK_EQ(rotary, !args.rotary.empty()) << "the rotary table goes with kRotary";
  if (rotary) {
    CHECK(args.rotary_heads > 0 && args.rotary_heads * args.rotary.dim(1) <= n &&
          t % args.rotary.dim(0) == 0)
        << args.rotary_heads << " heads of " << args.rotary.ToString() << " in " << t << " x " << n;
    CheckRotary(args.RotaryHeads(), args.rotary);
  }
  CheckIsOrEmpty("residual", args.residual, act, {t, n});
  CHECK(args.residual.empty() ||
        (args.epilogue == Epilogue::kNone && args.residual.data() != args.y.data()))
      << "residual goes with kNone, and does not alias y";
  if (args.epilogue != Epilogue::kNone && !rotary) {
    CheckIs("pre", args.pre, act, {t, n});
  } else {
    CHECK(args.pre.empty()) << "pre goes with an activation";
  }
  MUSTER_DISPATCH(LinearForward, args);
}

void LinearBackward(Stream& stream, const LinearBackwardArgs& args) {
  CheckBackward(args);
  MUSTER_DISPATCH(LinearBackward, args);
}

void WeightGradient(Stream& stream, const WeightGradientArgs& args, bool* has_squares) {
  CHECK(args.dy.rank() == 2 && args.x.rank() == 2 && !args.dw.empty());
  CheckBackward({.dy = args.dy,
                 .x = args.x,
                 .w = Tensor(args.dw.data(), args.dy.dtype(), {args.dy.dim(1), args.x.dim(1)}),
                 .dw = args.dw,
                 .dbias = args.dbias});
  CheckFp32(args.squares);
  CHECK_EQ(args.squares.elements(), 2 * kSquareParts);
  MUSTER_DISPATCH(WeightGradient, args, has_squares);
}

}  // namespace muster::kernels
