#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "kernels/loss/cross_entropy.h"
#include "tests/kernels/support.h"

namespace muster::kernels {
namespace {

using testing::Doubles;
using testing::ExpectClose;
using testing::Floats;
using testing::Host;
using testing::Random;
using testing::View;

constexpr int64_t kRows = 6, kVocab = 101, kColumns = 128;

double LossOf(const double* z, int64_t target) {
  double most = -1e300, sum = 0;
  for (int64_t i = 0; i < kVocab; ++i) most = std::max(most, z[i]);
  for (int64_t i = 0; i < kVocab; ++i) sum += std::exp(z[i] - most);
  return std::log(sum) + most - z[target];
}

std::vector<int32_t> Targets() { return {0, 100, -1, 50, 7, 7}; }

TEST(CrossEntropy, LossAndGradient_MaskedRowsAndPadding_MatchFiniteDifferences) {
  for (float stddev : {1.0f, 40.0f}) {
    Host host;
    std::vector<int32_t> targets = Targets();
    Floats logits = Random(kRows * kColumns, 1, stddev), losses(kRows);
    Doubles z = testing::Wide(logits);
    Doubles expected(kRows);
    for (int64_t t = 0; t < kRows; ++t) {
      if (targets[t] >= 0) expected[t] = LossOf(&z[t * kColumns], targets[t]);
    }
    const Doubles gradient = testing::NumericGradient(z, [&] {
      double sum = 0;
      for (int64_t t = 0; t < kRows; ++t) {
        if (targets[t] >= 0) sum += LossOf(&z[t * kColumns], targets[t]);
      }
      return 0.25 * sum;
    });
    CrossEntropy(*host.stream, {.logits = View(logits, {kRows, kColumns}),
                                .targets = View(targets, {kRows}),
                                .losses = View(losses, {kRows}),
                                .vocab = kVocab,
                                .scale = 0.25f});
    ExpectClose(losses, expected, 1e-6, "losses");
    EXPECT_EQ(losses[2], 0.0f);
    ExpectClose(logits, gradient, 1e-5, "gradient");
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t i = kVocab; i < kColumns; ++i) ASSERT_EQ(logits[t * kColumns + i], 0.0f);
    }
    for (int64_t i = 0; i < kColumns; ++i) ASSERT_EQ(logits[2 * kColumns + i], 0.0f);
  }
}

TEST(CrossEntropy, VocabularyInShards_GivesTheLossesAndTheGradientOfTheWhole) {
  constexpr int64_t kShardColumns = 80;
  const std::vector<std::pair<int64_t, int64_t>> shards = {{0, 1}, {1, 77}, {78, 23}};
  const int64_t ranks = static_cast<int64_t>(shards.size());
  for (float stddev : {1.0f, 40.0f}) {
    Host host;
    std::vector<int32_t> targets = Targets();
    Floats whole = Random(kRows * kColumns, 1, stddev), losses(kRows);
    Floats stats(ranks * kRows * 3);
    std::vector<Floats> parts;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto [first, count] = shards[rank];
      Floats part(kRows * kShardColumns, 1e6f);  // the padding must not matter
      for (int64_t t = 0; t < kRows; ++t) {
        std::copy_n(&whole[t * kColumns + first], count, &part[t * kShardColumns]);
      }
      parts.push_back(part);
      CrossEntropyStats(*host.stream,
                        {.logits = View(parts.back(), {kRows, kShardColumns}),
                         .targets = View(targets, {kRows}),
                         .first = first,
                         .vocab = count,
                         .stats = View(stats, {ranks * kRows, 3}).Rows(rank * kRows, kRows)});
      EXPECT_EQ(parts.back(), part);
    }
    CrossEntropy(*host.stream, {.logits = View(whole, {kRows, kColumns}),
                                .targets = View(targets, {kRows}),
                                .losses = View(losses, {kRows}),
                                .vocab = kVocab,
                                .scale = 0.25f});
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const auto [first, count] = shards[rank];
      Floats merged(kRows);
      CrossEntropyMerge(*host.stream, {.logits = View(parts[rank], {kRows, kShardColumns}),
                                       .targets = View(targets, {kRows}),
                                       .first = first,
                                       .vocab = count,
                                       .stats = View(stats, {ranks, kRows, 3}),
                                       .losses = View(merged, {kRows}),
                                       .scale = 0.25f});
      for (int64_t t = 0; t < kRows; ++t) {
        EXPECT_NEAR(merged[t], losses[t], 1e-6 * (1 + losses[t])) << t;
        for (int64_t i = 0; i < kShardColumns; ++i) {
          const float expected = i < count ? whole[t * kColumns + first + i] : 0.0f;
          ASSERT_NEAR(parts[rank][t * kShardColumns + i], expected, 1e-7) << t << ", " << i;
        }
      }
    }
  }
}

TEST(CrossEntropy, WithoutGradient_LeavesLogitsAndGivesTheSameLosses) {
  Host host;
  std::vector<int32_t> targets = Targets();
  Floats logits = Random(kRows * kColumns, 1), losses(kRows), same(kRows);
  const Floats before = logits;
  CrossEntropyArgs args = {.logits = View(logits, {kRows, kColumns}),
                           .targets = View(targets, {kRows}),
                           .losses = View(losses, {kRows}),
                           .vocab = kVocab,
                           .write_gradient = false};
  CrossEntropy(*host.stream, args);
  EXPECT_EQ(logits, before);
  args.losses = View(same, {kRows});
  args.write_gradient = true;
  CrossEntropy(*host.stream, args);
  EXPECT_EQ(losses, same);
}

TEST(CrossEntropy, PaddingColumns_WithHugeValues_DoNotCount) {
  Host host;
  std::vector<int32_t> targets = {3};
  Floats logits(kColumns, 0.0f), losses(1);
  for (int64_t i = kVocab; i < kColumns; ++i) logits[i] = 1e30f;
  CrossEntropy(*host.stream, {.logits = View(logits, {1, kColumns}),
                              .targets = View(targets, {1}),
                              .losses = View(losses, {1}),
                              .vocab = kVocab});
  EXPECT_NEAR(losses[0], std::log(101.0), 1e-6);
}

TEST(CrossEntropy, ExtremeLogits_GiveExactOrNanLosses) {
  Host host;
  std::vector<int32_t> targets = {0, 1, 0};
  Floats logits(3 * kColumns, 0.0f), losses(3);
  logits[0] = 1e30f;                         // certain and right
  logits[kColumns] = 1e4f;                   // certain and wrong
  logits[2 * kColumns + 5] = std::nanf("");  // must not be lost
  CrossEntropy(*host.stream, {.logits = View(logits, {3, kColumns}),
                              .targets = View(targets, {3}),
                              .losses = View(losses, {3}),
                              .vocab = kVocab});
  EXPECT_EQ(losses[0], 0.0f);
  EXPECT_EQ(losses[1], 1e4f);
  EXPECT_TRUE(std::isnan(losses[2]));
}

}  // namespace
}  // namespace muster::kernels
