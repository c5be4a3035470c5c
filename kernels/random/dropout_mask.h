// Which elements dropout drops (dropout.h): the same arithmetic on host and device.
//
// Columns 4g to 4g + 3 of a token take the four words of one Philox4x32-10 block. Counter: (sample
// low, sample high, position, site * 2^16 + g), so no two elements of a run share a word; key: the
// seed, xored with a constant so that initial weights (FillNormal) use other blocks. An element is
// dropped when its word is below probability * 2^32.
#ifndef MUSTER_KERNELS_RANDOM_DROPOUT_MASK_H_
#define MUSTER_KERNELS_RANDOM_DROPOUT_MASK_H_

#include <cmath>
#include <cstdint>

#include "kernels/portable.h"
#include "kernels/random/philox.h"

namespace muster::kernels {

struct DropoutMask {
  static constexpr int64_t kSites = 1 << 16;
  static constexpr int64_t kColumns = 4 << 16;

  uint32_t key[2];
  uint32_t site;
  uint32_t threshold;  // words below are dropped
  float scale;         // of elements that are kept

  static DropoutMask Make(double probability, uint64_t seed, int64_t site) {
    const uint64_t key = seed ^ 0x64726f706f757421u;
    // Below 2^32, as the probability is below 1 in double by at least 2^-53 but may round up.
    const double threshold = std::fmin(std::round(probability * 0x1p32), 0x1p32 - 1);
    return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)},
            static_cast<uint32_t>(site),
            static_cast<uint32_t>(threshold),
            static_cast<float>(1 / (1 - probability))};
  }

  // What the four columns of `group` are multiplied by: 0 or the scale.
  MUSTER_HOST_DEVICE void Factors(uint64_t sample, uint32_t position, uint32_t group,
                                  float (&factors)[4]) const {
    uint32_t words[4] = {static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32),
                         position, site << 16 | group};
    Philox4x32(words, key[0], key[1]);
    for (int i = 0; i < 4; ++i) factors[i] = words[i] < threshold ? 0.0f : scale;
  }
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_RANDOM_DROPOUT_MASK_H_
