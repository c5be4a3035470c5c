// Philox4x32-10, the counter-based generator of Salmon et al., "Parallel random numbers: as easy
// as 1, 2, 3", SC 2011: four random words from a counter and a key, without state.
#ifndef MUSTER_KERNELS_RANDOM_PHILOX_H_
#define MUSTER_KERNELS_RANDOM_PHILOX_H_

#include <array>
#include <cstdint>

#include "kernels/portable.h"
#include "kernels/random/philox_constants.h"

namespace muster::kernels {

// Replaces the counter by the random words.
MUSTER_HOST_DEVICE inline void Philox4x32(uint32_t (&counter)[4], uint32_t key0, uint32_t key1) {
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t wide0 = uint64_t{kPhiloxMultiplier0} * counter[0];
    const uint64_t wide1 = uint64_t{kPhiloxMultiplier1} * counter[2];
    counter[0] = static_cast<uint32_t>(wide1 >> 32) ^ counter[1] ^ key0;
    counter[1] = static_cast<uint32_t>(wide1);
    counter[2] = static_cast<uint32_t>(wide0 >> 32) ^ counter[3] ^ key1;
    counter[3] = static_cast<uint32_t>(wide0);
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

inline std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter,
                                          std::array<uint32_t, 2> key) {
  uint32_t words[4] = {counter[0], counter[1], counter[2], counter[3]};
  Philox4x32(words, key[0], key[1]);
  return {words[0], words[1], words[2], words[3]};
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_RANDOM_PHILOX_H_
