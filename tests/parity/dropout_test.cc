// Dropout drops the same elements in every layout, and none in evaluations.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/parity/harness.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

class DropoutParity : public ::testing::Test {
 protected:
  static Case On(const ModelDescription& model, const PerAxis& degrees = PerAxis(1, 1, 1, 1)) {
    Case run = Data(1);
    run.model = model;
    run.layout.degrees = degrees;
    run.dropout = 0.1;
    run.steps = 12;
    return run;
  }
  static Case Pipeline(const ModelDescription& model, PipelineSchedule schedule, int chunks = 1) {
    Case run = On(model, PerAxis(2, 1, 1, 1));
    run.schedule = schedule;
    run.layout.pipeline_chunks = chunks;
    return run;
  }
  static Case Zero(const ModelDescription& model, int stage) {
    Case run = On(model, PerAxis(1, 4, 1, 1));
    run.layout.zero = stage;
    return run;
  }

  Harness harness_;
};

TEST_F(DropoutParity, DataZeroPipelineAndRecomputation_ChangeNoBits) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama()}) {
    const RankResult alone = harness_.Train(On(model))[0];
    std::vector<Case> runs = {Zero(model, 0), Zero(model, 1), Zero(model, 2), Zero(model, 3)};
    runs.push_back(Pipeline(model, PipelineSchedule::kOneForwardOneBackward));
    runs.push_back(Pipeline(model, PipelineSchedule::kGPipe));
    runs.push_back(Pipeline(model, PipelineSchedule::kInterleaved, 2));
    runs.push_back(Pipeline(model, PipelineSchedule::kZeroBubble));
    // With a stage in the middle, which gets sample numbers although it loads no tokens.
    runs.push_back(On(model, PerAxis(3, 2, 1, 1)));
    for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
      runs.push_back(On(model));
      runs.back().recompute = recompute;
    }
    runs.push_back(Pipeline(model, PipelineSchedule::kOneForwardOneBackward));
    runs.back().recompute = Recompute::kFull;
    runs.back().recompute_blocks = 1;
    runs.push_back(On(model));
    runs.back().offload_activations = true;
    for (const Case& run : runs) {
      SCOPED_TRACE(run.ToString());
      const RankResult result = harness_.Train(run)[0];
      // The stages of a tied table sum its gradient in another order.
      if (model.family == "gpt2" && run.layout.degrees[Axis::kPipeline] > 1) {
        ExpectClose(alone, result, 1e-5);
      } else {
        ExpectSameBits(alone, result);
      }
    }
  }
}

TEST_F(DropoutParity, TensorSequenceAndContextRanks_TrainLikeOne) {
  for (const ModelDescription& model : {SmallGpt2(), SmallLlama()}) {
    const RankResult alone = harness_.Train(On(model))[0];
    const Tensors gradients = harness_.FirstGradients(On(model));
    std::vector<Case> runs = {On(model, PerAxis(1, 1, 1, 2))};
    for (const TensorOverlap overlap : {TensorOverlap::kHalves, TensorOverlap::kNone,
                                        TensorOverlap::kBackward, TensorOverlap::kChunked}) {
      for (const PerAxis& degrees : {PerAxis(1, 1, 1, 2), PerAxis(2, 1, 1, 2)}) {
        runs.push_back(On(model, degrees));
        runs.back().layout.sequence_parallel = true;
        runs.back().tensor_overlap = overlap;
        if (degrees[Axis::kPipeline] > 1 && overlap != TensorOverlap::kHalves) {
          runs.back().schedule = PipelineSchedule::kZeroBubble;
        }
      }
    }
    runs.push_back(On(model, PerAxis(1, 1, 1, 2)));
    runs.back().tensor_overlap = TensorOverlap::kHalves;
    runs.push_back(runs.back());
    runs.back().schedule = PipelineSchedule::kOneForwardOneBackward;
    runs.back().recompute = Recompute::kFull;
    for (const ContextMethod method : {ContextMethod::kRing, ContextMethod::kAllToAll}) {
      runs.push_back(On(model, PerAxis(1, 2, 2, 1)));
      runs.back().context_method = method;
    }
    runs.push_back(On(model, PerAxis(1, 1, 2, 2)));
    runs.back().layout.sequence_parallel = true;
    // The same samples in other micro-batches.
    runs.push_back(On(model));
    runs.back().layout.micro_batch = 8;
    for (const Case& run : runs) {
      SCOPED_TRACE(run.ToString());
      ExpectClose(alone, harness_.Train(run)[0], 1e-5);
      ExpectClose(gradients, harness_.FirstGradients(run));
    }
  }
}

TEST_F(DropoutParity, ResumedRun_DropsTheElementsOfAnUnbrokenRun) {
  const RankResult whole = harness_.Train(On(SmallLlama()))[0];
  for (const auto& [saving, resuming] : std::vector<std::pair<Case, Case>>{
           {On(SmallLlama()), On(SmallLlama())},
           {Zero(SmallLlama(), 3), Pipeline(SmallLlama(), PipelineSchedule::kZeroBubble)}}) {
    SCOPED_TRACE(saving.ToString() + " -> " + resuming.ToString());
    Case first = saving, second = resuming;
    first.save_every = 100;
    first.stop_after = 5;
    second.restore = harness_.Train(first)[0].saved;
    ASSERT_EQ(second.restore.size(), 1u);
    const RankResult rest = harness_.Train(second)[0];
    EXPECT_EQ(rest.losses, std::vector<double>(whole.losses.begin() + 5, whole.losses.end()));
    EXPECT_EQ(rest.norms, std::vector<double>(whole.norms.begin() + 5, whole.norms.end()));
  }
}

// The learning rate is zero, so that the weights stay the same.
TEST_F(DropoutParity, Evaluation_DropsNothing) {
  for (const PerAxis& degrees : {PerAxis(1, 1, 1, 1), PerAxis(3, 1, 1, 1)}) {
    Case run = On(SmallLlama(), degrees);
    run.learning_rate = 0;
    run.steps = 4;
    run.evaluate_every = 2;
    const RankResult dropping = harness_.Train(run)[0];
    run.dropout = 0;
    const RankResult plain = harness_.Train(run)[0];
    EXPECT_EQ(dropping.validation, plain.validation);
    EXPECT_EQ(plain.validation.size(), 2u);
    for (size_t step = 0; step < 4; ++step) EXPECT_NE(dropping.losses[step], plain.losses[step]);
  }
}

TEST_F(DropoutParity, AnotherProbability_GivesOtherLossesAndOneIsRefused) {
  Case run = On(SmallGpt2());
  run.steps = 1;
  const std::vector<double> losses = harness_.Train(run)[0].losses;
  run.dropout = 0.2;
  EXPECT_NE(harness_.Train(run)[0].losses, losses);
  run.dropout = 1;
  run.may_fail = true;
  EXPECT_THAT(harness_.Train(run)[0].status,
              muster::testing::StatusIs(absl::StatusCode::kInvalidArgument,
                                        ::testing::HasSubstr("dropout 1 is not a probability")));
}

}  // namespace
}  // namespace muster::parallel::parity
