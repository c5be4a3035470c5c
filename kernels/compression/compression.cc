#include "kernels/compression/compression.h"

#include <cstdint>
#include <limits>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(TakeLargest)
MUSTER_TWINS(SumSparse)
MUSTER_TWINS(TakeSigns)
MUSTER_TWINS(SumSigns)

void TakeLargest(Stream& stream, const TakeLargestArgs& args) {
  CheckFp32(args.x);
  if (!args.also.empty()) CheckSameFp32(args.x, args.also);
  const int64_t n = args.x.elements();
  CHECK(args.k >= 1 && args.k <= n) << args.k << " of " << n;
  CHECK(args.offset >= 0 && args.offset + n <= std::numeric_limits<int32_t>::max())
      << n << " elements from " << args.offset << " have no 32-bit index";
  if (!args.dense.empty()) {
    CheckSameFp32(args.x, args.dense);
  } else {
    CheckIs("indices", args.indices, DType::kI32, {args.k});
    CheckIs("values", args.values, DType::kF32, {args.k});
  }
  MUSTER_DISPATCH(TakeLargest, args);
}

void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out) {
  CheckFp32(out);
  CHECK(entries.dtype() == DType::kI32 && entries.rank() == 3 && entries.dim(1) == 2 &&
        entries.contiguous())
      << entries.ToString();
  CHECK_GE(first, 0);
  MUSTER_DISPATCH(SumSparse, entries, first, out);
}

void TakeSigns(Stream& stream, Tensor x, Tensor packed) {
  CheckFp32(x);
  CHECK_GT(x.elements(), 0);
  CheckIs("packed", packed, DType::kI32, {1 + (x.elements() + 31) / 32});
  MUSTER_DISPATCH(TakeSigns, x, packed);
}

void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out) {
  CheckFp32(out);
  CHECK(packed.dtype() == DType::kI32 && packed.rank() == 2 && packed.stride(1) == 1 &&
        first >= 0 && (first + out.elements() + 31) / 32 < packed.dim(1))
      << packed.ToString() << " for " << out.elements() << " elements from " << first;
  MUSTER_DISPATCH(SumSigns, packed, first, out);
}

}  // namespace muster::kernels
