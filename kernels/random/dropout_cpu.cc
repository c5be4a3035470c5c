// Dropout on the host.
#include <algorithm>
#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/device/host_device.h"
#include "kernels/random/dropout.h"
#include "kernels/random/dropout_mask.h"

namespace muster::kernels::cpu {
namespace {

constexpr int64_t kRows = 16;

}  // namespace

void Dropout(Stream& stream, const DropoutArgs& args) {
  const DropoutMask mask = DropoutMask::Make(args.probability, args.seed, args.site);
  EnqueueOnHost(stream, [args, mask](ThreadPool& pool) {
    const int64_t rows = args.x.dim(0), columns = args.x.dim(1);
    const auto* const words = args.sample.as<uint32_t>();
    const uint64_t first_sample = words[0] | static_cast<uint64_t>(words[1]) << 32;
    pool.Run((rows + kRows - 1) / kRows, [&](int64_t task) {
      for (int64_t row = task * kRows; row < std::min(rows, (task + 1) * kRows); ++row) {
        const int64_t token = args.first_row + row, index = token % args.sequence;
        const uint64_t sample = first_sample + static_cast<uint64_t>(token / args.sequence);
        const auto position = static_cast<uint32_t>(
            args.positions.empty() ? index : args.positions.as<int32_t>()[index]);
        const float* const x = args.x.f32() + row * columns;
        float* const out = args.out.f32() + row * columns;
        for (int64_t i = 0; i < columns; i += 4) {
          float factors[4];
          mask.Factors(sample, position, static_cast<uint32_t>(i / 4), factors);
          const int64_t count = std::min<int64_t>(4, columns - i);
          for (int64_t j = 0; j < count; ++j) out[i + j] = x[i + j] * factors[j];
        }
      }
    });
  });
}

}  // namespace muster::kernels::cpu
