#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "kernels/random/dropout.h"
#include "kernels/random/dropout_mask.h"
#include "kernels/random/philox.h"
#include "kernels/tensor.h"
#include "tests/kernels/support.h"
#include "tests/support/status_matchers.h"

namespace muster::kernels {
namespace {

using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

std::vector<int32_t> Words(uint64_t sample) {
  std::vector<int32_t> words(2);
  std::memcpy(words.data(), &sample, sizeof(sample));
  return words;
}

// `rows` tokens from `first_row` on of samples of `sequence` tokens.
struct Problem {
  int64_t rows = 0, columns = 0, sequence = 0;
  double probability = 0.3;
  uint64_t seed = 11, sample = 5;
  int64_t site = 3, first_row = 0;
  std::vector<int32_t> positions = {};

  DropoutArgs Args(Floats& x, Floats& out, std::vector<int32_t>& words) {
    words = Words(sample);
    return {.x = View(x, {rows, columns}),
            .out = View(out, {rows, columns}),
            .probability = probability,
            .seed = seed,
            .site = site,
            .sample = View(words, {2}),
            .sequence = sequence,
            .first_row = first_row,
            .positions = positions.empty() ? Tensor() : View(positions, {sequence})};
  }
  Floats Run(Floats x, int threads = 2) {
    Host host(threads);
    Floats out(x.size(), NAN);
    std::vector<int32_t> words;
    Dropout(*host.stream, Args(x, out, words));
    CHECK_OK(host.stream->Synchronize());
    return out;
  }
  // 1 where an element is kept.
  Floats Mask() {
    Floats mask = Run(Floats(rows * columns, 1.0f));
    for (float& value : mask) value = value != 0 ? 1.0f : 0.0f;
    return mask;
  }
};

// The definition once more, from the generator on, whose known answers random_test.cc checks.
TEST(Dropout, EveryElement_IsThatOfThePlainDefinition) {
  for (const int64_t columns : {1, 3, 4, 10, 64}) {
    Problem problem{.rows = 23, .columns = columns, .sequence = 7};
    problem.sample = (uint64_t{9} << 32) - 2;  // the samples' numbers carry into the upper half
    problem.first_row = 4;
    problem.positions = {3, 4, 5, 40, 41, 42, 43};
    const Floats x = Random(23 * columns, 1);
    const Floats actual = problem.Run(x);
    const uint64_t key = problem.seed ^ 0x64726f706f757421u;
    for (int64_t row = 0; row < 23; ++row) {
      const int64_t token = row + 4;
      const uint64_t sample = problem.sample + static_cast<uint64_t>(token / 7);
      for (int64_t column = 0; column < columns; ++column) {
        const auto words =
            Philox4x32({static_cast<uint32_t>(sample), static_cast<uint32_t>(sample >> 32),
                        static_cast<uint32_t>(problem.positions[token % 7]),
                        static_cast<uint32_t>((3 << 16) + column / 4)},
                       {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)});
        const bool stays = words[column % 4] >= 0.3 * 0x1p32;
        const float value = x[row * columns + column];
        EXPECT_EQ(actual[row * columns + column],
                  stays ? value * static_cast<float>(1 / 0.7) : value * 0.0f)
            << row << ", " << column;
      }
    }
  }
}

TEST(Dropout, ShareOfDroppedElements_IsTheProbability) {
  for (const double probability : {0.0, 0.1, 0.5, 0.97}) {
    Problem problem{.rows = 600, .columns = 512, .sequence = 100};
    problem.probability = probability;
    const double n = 600 * 512;
    double stays = 0, sum = 0;
    std::vector<double> of_column(512, 0);
    const Floats out = problem.Run(Floats(600 * 512, 1.0f));
    for (size_t i = 0; i < out.size(); ++i) {
      stays += out[i] != 0 ? 1 : 0;
      sum += static_cast<double>(out[i]);
      of_column[i % 512] += out[i] != 0 ? 1 : 0;
    }
    // Within five standard deviations; the mean is kept.
    const double deviation = std::sqrt(n * probability * (1 - probability));
    EXPECT_NEAR(stays, n * (1 - probability), 5 * deviation + 1e-9) << probability;
    EXPECT_NEAR(sum / n, 1, 5 * deviation / n / (1 - probability) + 1e-6) << probability;
    for (const double count : of_column) {
      EXPECT_NEAR(count, 600 * (1 - probability), 5.5 * deviation / std::sqrt(512.0) + 1e-9);
    }
  }
}

TEST(Dropout, OtherSeedSiteSamplePositionOrColumn_DrawAnew) {
  const Problem base{.rows = 1, .columns = 256, .sequence = 1};
  std::map<Floats, const char*> seen;
  const auto expect_new = [&](const char* what, Problem problem) {
    const auto [at, inserted] = seen.emplace(problem.Mask(), what);
    EXPECT_TRUE(inserted) << what << " draws as " << at->second;
  };
  expect_new("the base", base);
  Problem other = base;
  other.seed = 12;
  expect_new("another seed", other);
  other = base;
  other.site = 4;
  expect_new("another site", other);
  other = base;
  other.sample = 6;
  expect_new("another sample", other);
  other = base;
  other.sample = 5 + (uint64_t{1} << 32);
  expect_new("a sample of the same lower half", other);
  other = base;
  other.positions = {1};
  expect_new("another position", other);
  const Floats mask = Problem(base).Mask();
  EXPECT_NE(Floats(mask.begin(), mask.begin() + 128), Floats(mask.begin() + 128, mask.end()));
}

// The slices of a batch under data, sequence and context parallelism, and other micro-batches.
TEST(Dropout, AnyPartOfABatch_HasTheMaskOfTheWhole) {
  constexpr int64_t kSequence = 12, kColumns = 20, kSamples = 6;
  Problem whole{.rows = kSamples * kSequence, .columns = kColumns, .sequence = kSequence};
  const Floats mask = whole.Mask();
  const auto rows = [&](int64_t first, int64_t count) {
    return Floats(mask.begin() + first * kColumns, mask.begin() + (first + count) * kColumns);
  };
  // Rows of one rank.
  for (const int64_t first : {0, 18, 54}) {
    Problem part = whole;
    part.rows = 18;
    part.first_row = first;
    EXPECT_EQ(part.Mask(), rows(first, 18)) << first;
  }
  // Samples of a later micro-batch.
  Problem later = whole;
  later.rows = 2 * kSequence;
  later.sample = whole.sample + 4;
  EXPECT_EQ(later.Mask(), rows(4 * kSequence, 2 * kSequence));
  // Tokens of a rank that shares sequences.
  Problem shared = whole;
  shared.sequence = 6;
  shared.rows = kSamples * 6;
  shared.positions = {3, 4, 5, 6, 7, 8};
  const Floats local = shared.Mask();
  for (int64_t sample = 0; sample < kSamples; ++sample) {
    EXPECT_EQ(
        Floats(local.begin() + sample * 6 * kColumns, local.begin() + (sample + 1) * 6 * kColumns),
        rows(sample * kSequence + 3, 6));
  }
}

TEST(Dropout, OfAGradient_IsTheBackwardPass) {
  Problem problem{.rows = 5, .columns = 7, .sequence = 5};
  const Floats x = Random(35, 1), dy = Random(35, 2);
  const Floats dx = problem.Run(dy), y = problem.Run(x), ones = problem.Run(Floats(35, 1.0f));
  for (size_t i = 0; i < x.size(); ++i) {
    // Dropout is linear, so the derivative is what it makes of ones.
    EXPECT_EQ(y[i], x[i] * ones[i]);
    EXPECT_EQ(dx[i], dy[i] * ones[i]);
  }
}

TEST(Dropout, InPlaceAndWithAnyThreads_HasTheSameBits) {
  Problem problem{.rows = 101, .columns = 37, .sequence = 50};
  const Floats x = Random(101 * 37, 1);
  const Floats expected = problem.Run(x);
  for (const int threads : {1, 3, 7}) EXPECT_EQ(problem.Run(x, threads), expected) << threads;
  Host host;
  Floats in_place = x;
  std::vector<int32_t> words;
  Dropout(*host.stream, problem.Args(in_place, in_place, words));
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_EQ(in_place, expected);
}

TEST(Dropout, ProbabilityNextToOne_DropsAllButAFewAndStaysFinite) {
  Problem problem{.rows = 10, .columns = 100, .sequence = 10};
  problem.probability = std::nextafter(1.0, 0.0);
  for (const float value : problem.Run(Floats(1000, 1.0f))) EXPECT_TRUE(std::isfinite(value));
  EXPECT_EQ(DropoutMask::Make(problem.probability, 0, 0).threshold, ~0u);
}

}  // namespace
}  // namespace muster::kernels
