#include "kernels/attention/rotary.h"
#include "kernels/gemm/linear.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"
#include "tests/support/status_matchers.h"

namespace muster::kernels {
namespace {

using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

TEST(RotaryTable, HoldsCosineAndSineOfEachPosition) {
  Host host;
  constexpr int64_t kRows = 37, kWidth = 10, kFirst = 1000;
  Floats table(kRows * kWidth);
  RotaryTable(*host.stream,
              {.table = View(table, {kRows, kWidth}), .first_position = kFirst, .theta = 500.0f});
  for (int64_t s = 0; s < kRows; ++s) {
    for (int64_t i = 0; i < kWidth / 2; ++i) {
      const double angle = static_cast<double>(kFirst + s) * std::pow(500.0, -2.0 * i / kWidth);
      ASSERT_NEAR(table[s * kWidth + i], std::cos(angle), 1e-6);
      ASSERT_NEAR(table[s * kWidth + kWidth / 2 + i], std::sin(angle), 1e-6);
    }
  }
  // Rows of given positions are the rows of a longer table.
  std::vector<int32_t> positions = {1003, 1000, 1036};
  Floats rows(3 * kWidth);
  RotaryTable(
      *host.stream,
      {.table = View(rows, {3, kWidth}), .positions = View(positions, {3}), .theta = 500.0f});
  for (int64_t s = 0; s < 3; ++s) {
    for (int64_t i = 0; i < kWidth; ++i) {
      EXPECT_EQ(rows[s * kWidth + i], table[(positions[s] - kFirst) * kWidth + i]);
    }
  }
}

TEST(RotaryTable, Scaling_StretchesOnlyLongWaves) {
  Host host;
  constexpr int64_t kWidth = 64;
  RotaryTableArgs args;
  Floats plain(2 * kWidth), scaled(2 * kWidth);
  args.table = View(plain, {2, kWidth});
  RotaryTable(*host.stream, args);
  args.table = View(scaled, {2, kWidth});
  args.scaling = {
      .factor = 8, .low_frequency_factor = 1, .high_frequency_factor = 4, .original_context = 128};
  RotaryTable(*host.stream, args);
  int kept = 0, stretched = 0, between = 0;
  for (int64_t i = 0; i < kWidth / 2; ++i) {
    const double frequency = std::pow(10000.0, -2.0 * i / kWidth);
    const double wavelength = 2 * M_PI / frequency;
    const double sine = scaled[kWidth + kWidth / 2 + i];
    double expected = frequency;
    if (wavelength > 128) {
      expected = frequency / 8;
      ++stretched;
    } else if (wavelength < 32) {
      ++kept;
    } else {
      const double smooth = (128 / wavelength - 1) / 3;
      expected = (1 - smooth) * frequency / 8 + smooth * frequency;
      ++between;
    }
    EXPECT_NEAR(sine, std::sin(expected), 1e-6) << i;
  }
  EXPECT_GT(kept, 0);
  EXPECT_GT(stretched, 0);
  EXPECT_GT(between, 0);
}

// q heads, then k heads, then v heads in one row, as the model packs them.
TEST(Rotary, PackedHeads_AreRotatedAndRotatedBack) {
  Host host;
  constexpr int64_t kBatch = 3, kSequence = 19, kHeads = 5, kRotated = 4, kWidth = 6;
  constexpr int64_t kRow = kHeads * kWidth;
  const Floats before = Random(kBatch * kSequence * kRow, 1);
  Floats packed = before, table(kSequence * kWidth);
  RotaryTable(*host.stream, {.table = View(table, {kSequence, kWidth})});
  const Tensor x(packed.data(), DType::kF32, {kBatch, kSequence, kRotated, kWidth},
                 {kSequence * kRow, kRow, kWidth, 1});
  Rotary(*host.stream, x, View(table, {kSequence, kWidth}), false);
  testing::Doubles expected(before.begin(), before.end());
  for (int64_t t = 0; t < kBatch * kSequence; ++t) {
    for (int64_t head = 0; head < kRotated; ++head) {
      for (int64_t i = 0; i < kWidth / 2; ++i) {
        const double angle =
            static_cast<double>(t % kSequence) * std::pow(10000.0, -2.0 * i / kWidth);
        const int64_t a = t * kRow + head * kWidth + i, b = a + kWidth / 2;
        expected[a] = before[a] * std::cos(angle) - before[b] * std::sin(angle);
        expected[b] = before[b] * std::cos(angle) + before[a] * std::sin(angle);
      }
    }
  }
  ExpectClose(packed, expected, 1e-6, "rotated");
  Rotary(*host.stream, x, View(table, {kSequence, kWidth}), true);
  ExpectClose(packed, before, 1e-6, "rotated back");
}

TEST(Rotary, FusedIntoAGemm_HasTheBitsOfTwoOps) {
  const Host host;
  constexpr int64_t kBatch = 2, kSequence = 11, kHeads = 5, kRotated = 3, kWidth = 6, kInputs = 23;
  constexpr int64_t kTokens = kBatch * kSequence, kRow = kHeads * kWidth;
  Floats x = Random(kTokens * kInputs, 1), w = Random(kRow * kInputs, 2), bias = Random(kRow, 3);
  Floats table(kSequence * kWidth), fused(kTokens * kRow), apart(kTokens * kRow);
  RotaryTable(*host.stream, {.table = View(table, {kSequence, kWidth})});
  LinearForwardArgs args = {.x = View(x, {kTokens, kInputs}),
                            .w = View(w, {kRow, kInputs}),
                            .bias = View(bias, {kRow}),
                            .y = View(apart, {kTokens, kRow})};
  LinearForward(*host.stream, args);
  Rotary(*host.stream,
         Tensor(apart.data(), DType::kF32, {kBatch, kSequence, kRotated, kWidth},
                {kSequence * kRow, kRow, kWidth, 1}),
         View(table, {kSequence, kWidth}), false);
  args.y = View(fused, {kTokens, kRow});
  args.epilogue = Epilogue::kRotary;
  args.rotary = View(table, {kSequence, kWidth});
  args.rotary_heads = kRotated;
  LinearForward(*host.stream, args);
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_EQ(fused, apart);
}

}  // namespace
}  // namespace muster::kernels
