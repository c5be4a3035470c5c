#include "kernels/attention/rotary.h"

#include <cstdint>

#include "base/check.h"
#include "kernels/check_args.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "kernels/twins.h"

namespace muster::kernels {

MUSTER_TWINS(RotaryTable)
MUSTER_TWINS(Rotary)

void RotaryTable(Stream& stream, const RotaryTableArgs& args) {
  CHECK(args.table.rank() == 2 && args.table.dim(1) % 2 == 0) << args.table.ToString();
  CheckIs("table", args.table, DType::kF32, {args.table.dim(0), args.table.dim(1)});
  CheckIsOrEmpty("positions", args.positions, DType::kI32, {args.table.dim(0)});
  CHECK(args.first_position >= 0 && args.theta > 0);
  const RotaryScaling& scaling = args.scaling;
  CHECK(scaling.factor >= 1 && scaling.low_frequency_factor > 0 &&
        scaling.high_frequency_factor > scaling.low_frequency_factor &&
        scaling.original_context > 0);
  MUSTER_DISPATCH(RotaryTable, args);
}

void Rotary(Stream& stream, Tensor x, Tensor table, bool inverse) {
  CheckRotary(x, table);
  MUSTER_DISPATCH(Rotary, x, table, inverse);
}

}  // namespace muster::kernels
