// Seeded randomness for decisions (ids, jitter, simulation). Training uses counter-based Philox
// from kernels/ instead, whose results do not depend on layout.
#ifndef MUSTER_BASE_RNG_H_
#define MUSTER_BASE_RNG_H_

#include <cstdint>
#include <string>

#include "base/check.h"

namespace muster {

// SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): one 64-bit word of state, same stream everywhere.
// Single-threaded.
class Rng {
 public:
  explicit Rng(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t z = (state_ += 0x9E3779B97F4A7C15ull);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
  }
  // Uniform in [0, bound). Requires: bound > 0.
  uint64_t Below(uint64_t bound) {
    CHECK_GT(bound, 0u);
    return static_cast<uint64_t>((static_cast<unsigned __int128>(Next()) * bound) >> 64);
  }
  // Uniform in [0, 1).
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1.0p-53; }
  bool Chance(double probability) { return Uniform() < probability; }
  // `length` letters and digits, without those that look alike and without vowels.
  std::string Letters(int length) {
    static constexpr char kAlphabet[] = "bcdfghjkmnpqrstvwxz23456789";
    std::string out;
    for (int i = 0; i < length; ++i) out.push_back(kAlphabet[Below(sizeof(kAlphabet) - 1)]);
    return out;
  }

 private:
  uint64_t state_;
};

}  // namespace muster

#endif  // MUSTER_BASE_RNG_H_
