#include "kernels/attention/attention.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(AttentionForward)
MUSTER_TWINS(AttentionBackward)
MUSTER_TWINS(AttentionMerge)

namespace {

void CheckForward(const AttentionArgs& args) {
  CHECK(args.q.rank() == 4 && args.k.rank() == 4);
  const DType act = args.q.dtype();
  const int64_t b = args.q.dim(0), s = args.q.dim(1), h = args.q.dim(2), d = args.q.dim(3);
  const int64_t keys = args.k.dim(1), g = args.k.dim(2);
  CHECK(g > 0 && h % g == 0) << h << " heads over " << g << " key/value heads";
  CHECK(!args.causal || keys == s) << "causal attention of " << s << " queries over " << keys;
  CheckHeads("q", args.q, act, b, s, h, d);
  CheckHeads("k", args.k, act, b, keys, g, d);
  CheckHeads("v", args.v, act, b, keys, g, d);
  CheckHeads("out", args.out, act, b, s, h, d);
  CheckIs("lse", args.lse, DType::kF32, {b, h, s});
  CHECK(args.documents.empty() ||
        (args.documents.dtype() == DType::kI32 && args.documents.rank() == 2 &&
         args.documents.dim(0) == b && args.documents.dim(1) == s &&
         (args.documents.stride(1) == 1 || s == 1)))
      << "documents " << args.documents.ToString();
}

}  // namespace

void AttentionForward(Stream& stream, const AttentionArgs& args) {
  CheckForward(args);
  MUSTER_DISPATCH(AttentionForward, args);
}

void AttentionBackward(Stream& stream, const AttentionBackwardArgs& args) {
  CheckForward(args.forward);
  const Tensor& q = args.forward.q;
  const Tensor& k = args.forward.k;
  CheckHeads("dout", args.dout, q.dtype(), q.dim(0), q.dim(1), q.dim(2), q.dim(3));
  CheckHeads("dq", args.dq, q.dtype(), q.dim(0), q.dim(1), q.dim(2), q.dim(3));
  CheckHeads("dk", args.dk, k.dtype(), k.dim(0), k.dim(1), k.dim(2), k.dim(3));
  CheckHeads("dv", args.dv, k.dtype(), k.dim(0), k.dim(1), k.dim(2), k.dim(3));
  CheckIs("delta", args.delta, DType::kF32, {q.dim(0), q.dim(2), q.dim(1)});
  MUSTER_DISPATCH(AttentionBackward, args);
}

void AttentionMerge(Stream& stream, const AttentionMergeArgs& args) {
  CHECK_EQ(args.out.rank(), 4);
  const int64_t b = args.out.dim(0), s = args.out.dim(1), h = args.out.dim(2), d = args.out.dim(3);
  CHECK(IsActivation(args.out.dtype()) && IsActivation(args.partial_out.dtype()));
  CheckHeads("out", args.out, args.out.dtype(), b, s, h, d);
  CheckHeads("partial_out", args.partial_out, args.partial_out.dtype(), b, s, h, d);
  CheckIs("lse", args.lse, DType::kF32, {b, h, s});
  CheckIs("partial_lse", args.partial_lse, DType::kF32, {b, h, s});
  MUSTER_DISPATCH(AttentionMerge, args);
}

}  // namespace muster::kernels
