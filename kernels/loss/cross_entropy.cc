#include "kernels/loss/cross_entropy.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(CrossEntropy)
MUSTER_TWINS(CrossEntropyStats)
MUSTER_TWINS(CrossEntropyMerge)

void CrossEntropy(Stream& stream, const CrossEntropyArgs& args) {
  CHECK_EQ(args.logits.rank(), 2);
  const int64_t t = args.logits.dim(0), v = args.logits.dim(1);
  CheckIs("logits", args.logits, args.logits.dtype(), {t, v});
  CheckIs("targets", args.targets, DType::kI32, {t});
  CheckIs("losses", args.losses, DType::kF32, {t});
  CHECK(args.vocab > 0 && args.vocab <= v) << "vocab " << args.vocab << " of " << v << " columns";
  MUSTER_DISPATCH(CrossEntropy, args);
}

void CrossEntropyStats(Stream& stream, const CrossEntropyStatsArgs& args) {
  CHECK_EQ(args.logits.rank(), 2);
  const int64_t t = args.logits.dim(0), v = args.logits.dim(1);
  CheckIs("logits", args.logits, args.logits.dtype(), {t, v});
  CheckIs("targets", args.targets, DType::kI32, {t});
  CheckIs("stats", args.stats, DType::kF32, {t, 3});
  CHECK(args.first >= 0 && args.vocab > 0 && args.vocab <= v)
      << "vocab " << args.vocab << " from " << args.first << " of " << v << " columns";
  MUSTER_DISPATCH(CrossEntropyStats, args);
}

void CrossEntropyMerge(Stream& stream, const CrossEntropyMergeArgs& args) {
  CHECK(args.logits.rank() == 2 && args.stats.rank() == 3);
  const int64_t t = args.logits.dim(0), v = args.logits.dim(1);
  CheckIs("logits", args.logits, args.logits.dtype(), {t, v});
  CheckIs("targets", args.targets, DType::kI32, {t});
  CheckIs("losses", args.losses, DType::kF32, {t});
  CheckIs("stats", args.stats, DType::kF32, {args.stats.dim(0), t, 3});
  CHECK(args.first >= 0 && args.vocab > 0 && args.vocab <= v)
      << "vocab " << args.vocab << " from " << args.first << " of " << v << " columns";
  MUSTER_DISPATCH(CrossEntropyMerge, args);
}

}  // namespace muster::kernels
