#include "kernels/attention/attention_decode.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(AttentionDecode)

void AttentionDecode(Stream& stream, const AttentionDecodeArgs& args) {
  CHECK(args.q.rank() == 4 && args.k.rank() == 4);
  const DType act = args.q.dtype();
  const int64_t b = args.q.dim(0), h = args.q.dim(2), d = args.q.dim(3);
  const int64_t keys = args.k.dim(1), g = args.k.dim(2);
  CHECK(g > 0 && h % g == 0) << h << " heads over " << g << " key/value heads";
  CHECK_GE(keys, 1);
  CheckHeads("q", args.q, act, b, 1, h, d);
  CheckHeads("k", args.k, act, b, keys, g, d);
  CheckHeads("v", args.v, act, b, keys, g, d);
  CheckHeads("out", args.out, act, b, 1, h, d);
  CheckFp32(args.partial);
  CHECK_GE(args.partial.elements(), AttentionDecodePartials(b, h, keys, d));
  MUSTER_DISPATCH(AttentionDecode, args);
}

}  // namespace muster::kernels
