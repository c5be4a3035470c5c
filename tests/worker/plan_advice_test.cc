#include "worker/rank/plan_advice.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "proto/spec/spec.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"
#include "tests/worker/plan_specs.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/job_plan.h"

namespace muster::worker {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kGiB = int64_t{1} << 30;

// The stage is planned by its largest tensor share when blocks are moved.
TEST(CheapestFit, OfAPipelineWithUnevenShares_FitsTheLargestShare) {
  v1::JobSpec spec = Preset("llama-8b", {.pipeline = 2, .tensor = 2}, 64, 1);
  for (const double share : {1, 3}) {
    spec.mutable_engine()->mutable_parallel()->add_tensor_shares(share);
  }
  ASSERT_OK_AND_ASSIGN(const JobPlan before, PlanJob(spec));
  const int64_t bytes = before.needed_bytes() - kGiB;
  const std::optional<PlannedChange> change = CheapestFit(spec, bytes);
  ASSERT_TRUE(change.has_value());
  EXPECT_LE(change->plan.needed_bytes(), bytes);
}

TEST(CheapestFit, OfAPipeline_MovesBlocksFromTheStageThatIsTooLarge) {
  const v1::JobSpec spec = Preset("llama-8b", {.pipeline = 4, .data = 2, .zero = 3}, 64, 1);
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  ASSERT_EQ(plan.largest().pipeline, 0);  // 1F1B keeps the most micro-batches there
  const int64_t limit = plan.needed_bytes() - 1;
  const auto change = CheapestFit(spec, limit);
  ASSERT_TRUE(change.has_value());
  EXPECT_LE(change->plan.needed_bytes(), limit);
  // Blocks moved by hand are planned as they are asked for.
  v1::JobSpec moved = spec;
  for (const int blocks : {6, 8, 9, 9}) {
    moved.mutable_engine()->mutable_parallel()->add_pipeline_blocks(blocks);
  }
  ASSERT_OK(spec::Validate(moved));
  ASSERT_OK_AND_ASSIGN(const JobPlan by_hand, PlanJob(moved));
  EXPECT_EQ(by_hand.ranks[0].blocks, 6);
  EXPECT_EQ(by_hand.ranks[3].blocks, 9);
  EXPECT_LT(by_hand.imbalance(), plan.imbalance());
}

TEST(EvenMemory, OfAPipeline_MovesBlocksUntilNoOtherCutTakesLess) {
  const v1::JobSpec spec = Preset("llama-8b", {.pipeline = 4, .data = 2, .zero = 3}, 64, 1);
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  ASSERT_GT(plan.imbalance(), 0.05);
  const std::optional<PlannedChange> even = EvenMemory(spec, plan);
  ASSERT_TRUE(even.has_value());
  EXPECT_LT(even->plan.imbalance(), plan.imbalance() / 2);
  EXPECT_LT(even->plan.needed_bytes(), 0.95 * plan.needed_bytes());
  EXPECT_THAT(EvenText(*even), ::testing::StartsWith("engine.parallel.pipeline_blocks=["));
  // A block that moves between any two stages makes it no better.
  std::vector<int> blocks;
  for (const RankPlan& rank : even->plan.ranks) blocks.push_back(rank.blocks);
  for (size_t from = 0; from < blocks.size(); ++from) {
    for (size_t to = 0; to < blocks.size(); ++to) {
      if (from == to || blocks[from] == 1) continue;
      v1::JobSpec other = spec;
      for (size_t i = 0; i < blocks.size(); ++i) {
        other.mutable_engine()->mutable_parallel()->add_pipeline_blocks(
            blocks[i] + (i == to ? 1 : 0) - (i == from ? 1 : 0));
      }
      EXPECT_GT(PlanJob(other)->needed_bytes(), 0.99 * even->plan.needed_bytes());
    }
  }
  // Even already, or nothing to move.
  v1::JobSpec again = spec;
  for (const int count : blocks) {
    again.mutable_engine()->mutable_parallel()->add_pipeline_blocks(count);
  }
  EXPECT_FALSE(EvenMemory(again, *PlanJob(again)).has_value());
  const v1::JobSpec data = Preset("llama-8b", {.data = 8, .zero = 3}, 64, 1);
  EXPECT_FALSE(EvenMemory(data, *PlanJob(data)).has_value());
}

TEST(CheapestFit, OfAPipelineThatRecomputesAll_MovesBlocks) {
  v1::JobSpec spec = Preset("llama-8b", {.pipeline = 4, .data = 1}, 64, 1);
  spec.mutable_engine()->mutable_training()->set_recompute(v1::RECOMPUTE_FULL);
  spec.mutable_engine()->mutable_training()->set_any_order(true);
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  const int64_t limit = plan.needed_bytes() - 1;
  const auto change = CheapestFit(spec, limit);
  ASSERT_TRUE(change.has_value());
  ASSERT_THAT(change->settings, ElementsAre(HasSubstr("engine.parallel.pipeline_blocks=[")));
  EXPECT_LE(change->plan.needed_bytes(), limit);
  EXPECT_LT(change->plan.imbalance(), plan.imbalance());
  EXPECT_GE(change->slowdown, 1);
  int blocks = 0;
  for (const RankPlan& rank : change->plan.ranks) blocks += rank.blocks;
  EXPECT_EQ(blocks, 32);
}

TEST(CheapestFit, OfWhatFits_IsTheOneThatCostsLeast) {
  v1::JobSpec spec = Preset("llama-8b", {.data = 8, .zero = 1}, 64, 4);
  ASSERT_OK_AND_ASSIGN(JobPlan plan, PlanJob(spec));
  // One gradient buffer for both micro-batches costs no time, only the order of additions.
  const auto any_order = CheapestFit(spec, plan.needed_bytes() - 1);
  ASSERT_TRUE(any_order.has_value());
  EXPECT_THAT(any_order->settings, ElementsAre("engine.training.any_order=true"));
  spec.mutable_engine()->mutable_training()->set_any_order(true);
  ASSERT_OK_AND_ASSIGN(plan, PlanJob(spec));
  EXPECT_EQ(plan.needed_bytes(), any_order->plan.needed_bytes());
  // A little too small: ZeRO-2 sends more, which costs less than any change that saves more.
  const auto little = CheapestFit(spec, plan.needed_bytes() - 1);
  ASSERT_TRUE(little.has_value());
  EXPECT_THAT(little->settings, ElementsAre("engine.parallel.zero=2"));
  EXPECT_LT(little->plan.needed_bytes(), plan.needed_bytes());
  // Much too small: several changes at once, each of which is needed.
  const auto much = CheapestFit(spec, 40 * kGiB);
  ASSERT_TRUE(much.has_value());
  EXPECT_LE(much->plan.needed_bytes(), 40 * kGiB);
  EXPECT_GT(much->slowdown, little->slowdown);
  EXPECT_FALSE(CheapestFit(spec, kGiB).has_value());
}

// On one rank only the host's memory is left to use.
TEST(CheapestFit, OfALargeModelOnOneGpu_PutsSomeOfTheOptimizerOnTheHost) {
  const v1::JobSpec spec = Preset("llama-8b", {}, 8, 2);
  const int64_t device = 110 * kGiB;
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  ASSERT_GT(plan.needed_bytes(), device);
  const auto change = CheapestFit(spec, device);
  ASSERT_TRUE(change.has_value());
  EXPECT_LE(change->plan.needed_bytes(), device);
  EXPECT_THAT(change->settings, Contains(HasSubstr("engine.parallel.offload.optimizer=0.")));
  EXPECT_GT(change->slowdown, 1.05);
  // The host's memory is limited too: without enough of it there is no change that fits.
  EXPECT_LE(CheapestFit(spec, device, change->plan.host_bytes())->plan.host_bytes(),
            change->plan.host_bytes());
  EXPECT_FALSE(CheapestFit(spec, device, kGiB).has_value());
  EXPECT_THAT(AdviceText(std::nullopt), HasSubstr("offload.optimizer"));
}

// Recomputing fewer than all blocks fits: the advice names the fewest.
TEST(CheapestFit, OfWhatIsALittleTooLarge_RecomputesAsManyBlocksAsItTakes) {
  v1::JobSpec spec = Preset("gpt2-1558m", {}, 16, 16);
  ASSERT_OK_AND_ASSIGN(const JobPlan plan, PlanJob(spec));
  const int64_t limit = plan.needed_bytes() - 2 * kGiB;
  const auto change = CheapestFit(spec, limit);
  ASSERT_TRUE(change.has_value());
  ASSERT_THAT(change->settings,
              ElementsAre("engine.training.recompute=selective",
                          ::testing::StartsWith("engine.training.recompute_blocks=")));
  EXPECT_LE(change->plan.needed_bytes(), limit);
  EXPECT_LT(change->slowdown, 1.01);
  // One block fewer does not fit.
  int blocks = 0;
  ASSERT_TRUE(absl::SimpleAtoi(
      absl::StripPrefix(change->settings[1], "engine.training.recompute_blocks="), &blocks));
  ASSERT_GT(blocks, 1);
  spec.mutable_engine()->mutable_training()->set_recompute(v1::RECOMPUTE_SELECTIVE);
  spec.mutable_engine()->mutable_training()->set_recompute_blocks(blocks - 1);
  ASSERT_OK_AND_ASSIGN(const JobPlan fewer, PlanJob(spec));
  EXPECT_GT(fewer.needed_bytes(), limit);
  // A job that recomputes some blocks is advised to recompute more.
  const auto more = CheapestFit(spec, limit);
  ASSERT_TRUE(more.has_value());
  EXPECT_THAT(more->settings,
              ElementsAre(absl::StrCat("engine.training.recompute_blocks=", blocks)));
}

// Layouts that cannot fit must not use up the search's limit of predictions.
TEST(CheapestFit, OfManyLayouts_FindsTheOnesThatFit) {
  if (testing::kSanitized) GTEST_SKIP() << "predicts thousands of layouts, which takes minutes";
  const v1::JobSpec spec = Preset("llama-70b", {.data = 64}, 512, 8);
  const auto change = CheapestFit(spec, 76 * kGiB);
  ASSERT_TRUE(change.has_value());
  EXPECT_LE(change->plan.needed_bytes(), 76 * kGiB);
}

}  // namespace
}  // namespace muster::worker
