// Compiled once per instruction set, without contraction; see optimizer_loops.h, and loops.cc for
// what must not be used here. Plain loops over short arrays, which the compiler turns into vectors.
#include "kernels/random/philox_constants.h"
#include "kernels/simd/optimizer_loops.h"
#include "kernels/simd/vector.h"

namespace muster::kernels {
namespace {

constexpr int kBlocks = 64;  // at a time

struct Words {
  uint32_t of[4][kBlocks];
};

MUSTER_INLINE void Multiply(uint32_t by, const uint32_t (&x)[kBlocks], uint32_t (&high)[kBlocks],
                            uint32_t (&low)[kBlocks]) {
  for (int i = 0; i < kBlocks; ++i) {
    const uint64_t wide = uint64_t{by} * x[i];
    high[i] = static_cast<uint32_t>(wide >> 32);
    low[i] = static_cast<uint32_t>(wide);
  }
}

// Philox4x32 of kernels/random/philox.h, of kBlocks counters.
MUSTER_INLINE void Philox(Words& counter, uint64_t seed) {
  auto key0 = static_cast<uint32_t>(seed), key1 = static_cast<uint32_t>(seed >> 32);
  uint32_t high0[kBlocks], low0[kBlocks], high1[kBlocks], low1[kBlocks];
  for (int round = 0; round < kPhiloxRounds; ++round) {
    Multiply(kPhiloxMultiplier0, counter.of[0], high0, low0);
    Multiply(kPhiloxMultiplier1, counter.of[2], high1, low1);
    for (int i = 0; i < kBlocks; ++i) {
      counter.of[0][i] = high1[i] ^ counter.of[1][i] ^ key0;
      counter.of[2][i] = high0[i] ^ counter.of[3][i] ^ key1;
      counter.of[1][i] = low1[i];
      counter.of[3][i] = low0[i];
    }
    key0 += kPhiloxWeyl0;
    key1 += kPhiloxWeyl1;
  }
}

// -log(u) of u = (2k + 1) / 2^24, k the word's upper 23 bits: never that of 0 or 1. With u = 2^e m,
// m within a root of 2 of 1, log(m) = 2 artanh(s), s = (m - 1) / (m + 1), |s| < 0.172, by its
// series: the first term left out is 1e-9 of the sum.
MUSTER_INLINE float MinusLog(uint32_t word) {
  const float u = static_cast<float>(static_cast<int32_t>(word >> 9 << 1 | 1)) * 0x1p-24f;
  int32_t bits;
  __builtin_memcpy(&bits, &u, sizeof(bits));
  constexpr int32_t kRootHalf = 0x3f3504f3;  // the bits of sqrt(1/2)
  const int32_t exponent = (bits - kRootHalf) >> 23;
  const int32_t mantissa = bits - exponent * (1 << 23);
  float m;
  __builtin_memcpy(&m, &mantissa, sizeof(m));
  const float s = (m - 1.0f) / (m + 1.0f);
  const float z = s * s;
  const float series = (((1.0f / 9 * z + 1.0f / 7) * z + 1.0f / 5) * z + 1.0f / 3) * z;
  const float log_m = 2.0f * (s * series + s);
  return -(static_cast<float>(exponent) * 0.693147181f + log_m);
}

// The sine and cosine of an angle, uniform on the circle: the word's lower 30 bits place it in the
// first quadrant, at pi/4 + x, and the upper two are their signs. Series of both up to pi/4: the
// first terms left out are 2e-9 and 3e-8.
MUSTER_INLINE void SineAndCosine(uint32_t word, float& sine, float& cosine) {
  const int32_t centered = static_cast<int32_t>(word & 0x3fffffffu) - (1 << 29);
  const float x = (static_cast<float>(centered) + 0.5f) * (0x1p-30f * 1.57079633f);
  const float z = x * x;
  const float s = x + x * z * (((1.0f / 362880 * z - 1.0f / 5040) * z + 1.0f / 120) * z - 1.0f / 6);
  const float c = 1.0f + z * (((1.0f / 40320 * z - 1.0f / 720) * z + 1.0f / 24) * z - 0.5f);
  constexpr float kRootHalf = 0.707106781f;
  const float sum = (c + s) * kRootHalf, difference = (c - s) * kRootHalf;
  int32_t bits;
  __builtin_memcpy(&bits, &sum, sizeof(bits));
  bits ^= static_cast<int32_t>(word & 0x80000000u);
  __builtin_memcpy(&sine, &bits, sizeof(sine));
  __builtin_memcpy(&bits, &difference, sizeof(bits));
  bits ^= static_cast<int32_t>(word << 1 & 0x80000000u);
  __builtin_memcpy(&cosine, &bits, sizeof(cosine));
}

MUSTER_INLINE void BoxMuller(const uint32_t (&radius_words)[kBlocks],
                             const uint32_t (&angle_words)[kBlocks], float (&first)[kBlocks],
                             float (&second)[kBlocks]) {
  for (int i = 0; i < kBlocks; ++i) {
    const float radius = __builtin_sqrtf(2.0f * MinusLog(radius_words[i]));
    float sine, cosine;
    SineAndCosine(angle_words[i], sine, cosine);
    first[i] = radius * cosine;
    second[i] = radius * sine;
  }
}

}  // namespace

void MUSTER_SIMD_SYMBOL(Normals)(int64_t block, int64_t blocks, uint64_t seed, uint64_t stream_id,
                                 float* out) {
  for (int64_t begin = 0; begin < blocks; begin += kBlocks) {
    Words words;
    for (int i = 0; i < kBlocks; ++i) {
      const auto at = static_cast<uint64_t>(block + begin + i);
      words.of[0][i] = static_cast<uint32_t>(at);
      words.of[1][i] = static_cast<uint32_t>(at >> 32);
      words.of[2][i] = static_cast<uint32_t>(stream_id);
      words.of[3][i] = static_cast<uint32_t>(stream_id >> 32);
    }
    Philox(words, seed);
    float normal[4][kBlocks];
    BoxMuller(words.of[0], words.of[1], normal[0], normal[1]);
    BoxMuller(words.of[2], words.of[3], normal[2], normal[3]);
    const int64_t count = blocks - begin < kBlocks ? blocks - begin : kBlocks;
    float* const to = out + 4 * begin;
    for (int64_t i = 0; i < count; ++i) {
      for (int lane = 0; lane < 4; ++lane) to[4 * i + lane] = normal[lane][i];
    }
  }
}

}  // namespace muster::kernels
