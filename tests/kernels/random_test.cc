#include <array>
#include <cmath>

#include "kernels/random/philox.h"
#include "kernels/random/random.h"
#include "kernels/simd/loops.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Floats;
using testing::View;
using Words = std::array<uint32_t, 4>;

// Known answers of the authors' library, Random123 (kat_vectors, philox4x32 with 10 rounds).
TEST(Philox, KnownAnswers_OfTheReferenceLibrary_Match) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(Philox4x32({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(FillNormal, AnyPartOfATensor_HasTheValuesOfTheWhole) {
  Floats whole(1000);
  FillNormal(View(whole, {1000}), 7, 3, 0, 0, 1);
  for (int64_t first : {0, 1, 2, 3, 4, 997}) {
    Floats part(std::min<int64_t>(13, 1000 - first));
    FillNormal(View(part, {static_cast<int64_t>(part.size())}), 7, 3, first, 0, 1);
    for (size_t i = 0; i < part.size(); ++i) EXPECT_EQ(part[i], whole[first + i]);
  }
}

// The normals in double precision, from the same words.
TEST(FillNormal, Values_AreTheNormalsOfTheirWords) {
  constexpr int64_t kFirst = (int64_t{1} << 33) + 8;
  Floats values(40000);
  FillNormal(View(values, {40000}), 0x123456789abcdef0, 0xfedcba9876543210, kFirst, 0, 1);
  for (int64_t i = 0; i < 40000; i += 2) {
    const int64_t block = (kFirst + i) / 4;
    const Words words = Philox4x32(
        {static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0x76543210, 0xfedcba98},
        {0x9abcdef0, 0x12345678});
    const uint32_t radius_word = words[i % 4], angle_word = words[i % 4 + 1];
    const double radius = std::sqrt(-2 * std::log(((radius_word >> 9) + 0.5) * 0x1p-23));
    const double angle = ((angle_word & 0x3fffffff) + 0.5) * 0x1p-30 * M_PI / 2;
    const double cosine = (angle_word >> 30 & 1 ? -1 : 1) * radius * std::cos(angle);
    const double sine = (angle_word >> 31 & 1 ? -1 : 1) * radius * std::sin(angle);
    ASSERT_NEAR(values[i], cosine, 1e-6 * radius + 1e-9);
    ASSERT_NEAR(values[i + 1], sine, 1e-6 * radius + 1e-9);
  }
}

TEST(FillNormal, EveryInstructionSet_GivesTheSameBits) {
  Floats expected(4 * 1000);
  ChooseLoops().normals(77, 1000, 5, 6, expected.data());
  for (const char* name : {"generic", "avx2", "avx512"}) {
    const Loops* const loops = LoopsNamed(name);
    if (loops == nullptr) continue;
    Floats values(4 * 1000);
    loops->normals(77, 1000, 5, 6, values.data());
    EXPECT_EQ(values, expected) << name;
  }
}

TEST(FillNormal, OtherSeedOrStream_HasOtherValues) {
  Floats a(8), b(8), c(8), beyond(8);
  FillNormal(View(a, {8}), 7, 3, 0, 0, 1);
  FillNormal(View(b, {8}), 8, 3, 0, 0, 1);
  FillNormal(View(c, {8}), 7, 4, 0, 0, 1);
  FillNormal(View(beyond, {8}), 7, 3, int64_t{1} << 34, 0, 1);
  EXPECT_NE(a, b);
  EXPECT_NE(a, c);
  EXPECT_NE(a, beyond);
}

TEST(FillNormal, ManyValues_HaveTheMomentsOfANormalDistribution) {
  constexpr int64_t kCount = 400000;
  Floats x(kCount);
  FillNormal(View(x, {kCount}), 1, 0, 0, 0.5f, 2.0f);
  double mean = 0, variance = 0, fourth = 0;
  for (float value : x) mean += value;
  mean /= kCount;
  for (float value : x) variance += (value - mean) * (value - mean);
  variance /= kCount;
  for (float value : x) fourth += std::pow((value - mean) / std::sqrt(variance), 4);
  EXPECT_NEAR(mean, 0.5, 0.02);
  EXPECT_NEAR(variance, 4, 0.04);
  EXPECT_NEAR(fourth / kCount, 3, 0.1);
}

}  // namespace
}  // namespace muster::kernels
