// Initial weights: Philox4x32-10, and Box-Muller for normals, by global element index.
#include <algorithm>
#include <array>
#include <cstdint>

#include "kernels/random/philox.h"
#include "kernels/random/random.h"
#include "kernels/simd/loops.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// Element e uses word e % 4 of the block with counter e / 4; words 0 and 1, 2 and 3 make a pair of
// normals. Block counter: (index low, index high, stream low, stream high); key: seed.
void FillNormal(Tensor out, uint64_t seed, uint64_t stream_id, int64_t first, float mean,
                float stddev) {
  CHECK(out.contiguous() && first >= 0) << out.ToString() << " from " << first;
  constexpr int64_t kBlocks = 256;
  const Loops& loops = ChooseLoops();
  std::array<float, 4 * kBlocks> normals;
  float* data = out.f32();
  const int64_t end = first + out.elements();
  for (int64_t element = first; element < end;) {
    const int64_t block = element / 4;
    const int64_t blocks = std::min(kBlocks, (end + 3) / 4 - block);
    loops.normals(block, blocks, seed, stream_id, normals.data());
    const int64_t count = std::min(end, 4 * (block + blocks)) - element;
    const float* from = normals.data() + element % 4;
    for (int64_t i = 0; i < count; ++i) {
      // Without contraction (CMakeLists.txt).
      const float scaled = stddev * from[i];
      data[element - first + i] = mean + scaled;
    }
    element += count;
  }
}

void FillUniform(Tensor out, uint64_t seed, uint64_t stream_id, int64_t first) {
  CHECK(out.contiguous() && first >= 0) << out.ToString() << " from " << first;
  float* data = out.f32();
  std::array<uint32_t, 4> words{};
  for (int64_t i = 0; i < out.elements(); ++i) {
    const auto block = static_cast<uint64_t>(first + i) / 4;
    if (i == 0 || (first + i) % 4 == 0) {
      words = Philox4x32({static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32),
                          static_cast<uint32_t>(stream_id), static_cast<uint32_t>(stream_id >> 32)},
                         {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
    }
    data[i] = static_cast<float>(words[(first + i) % 4] >> 8) * 0x1p-24f;
  }
}

}  // namespace muster::kernels
