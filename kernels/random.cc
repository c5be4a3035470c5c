// Initial weights: Philox4x32-10 and Box-Muller by global element index.
#include <array>
#include <cmath>
#include <cstdint>

#include "kernels/ops.h"
#include "kernels/philox.h"

namespace muster::kernels {

// Element e uses word e % 4 of the block with counter e / 4; words 0 and 1, 2 and 3 make a pair of
// normals. Block counter: (index low, index high, stream low, stream high); key: seed.
void FillNormal(Tensor out, uint64_t seed, uint64_t stream_id, int64_t first, float mean,
                float stddev) {
  CHECK(out.contiguous() && first >= 0) << out.ToString() << " from " << first;
  float* data = out.f32();
  const int64_t end = first + out.elements();
  for (int64_t block = first / 4; block * 4 < end; ++block) {
    const std::array<uint32_t, 4> words =
        Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                    static_cast<uint32_t>(stream_id), static_cast<uint32_t>(stream_id >> 32)},
                   {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    double normal[4];
    for (int pair = 0; pair < 4; pair += 2) {
      // (word + 0.5) / 2^32 is never 0 or 1.
      const double radius = std::sqrt(-2 * std::log((words[pair] + 0.5) * 0x1p-32));
      const double angle = 2 * M_PI * ((words[pair + 1] + 0.5) * 0x1p-32);
      normal[pair] = radius * std::cos(angle);
      normal[pair + 1] = radius * std::sin(angle);
    }
    for (int lane = 0; lane < 4; ++lane) {
      const int64_t element = block * 4 + lane;
      if (element < first || element >= end) continue;
      data[element - first] = mean + stddev * static_cast<float>(normal[lane]);
    }
  }
}

}  // namespace muster::kernels
