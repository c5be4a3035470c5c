// A run on any pipeline trains like one without a pipeline (fp32, CPU ranks).
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "parallel/pipeline/stages.h"
#include "tests/parity/harness.h"
#include "tests/support/sanitized.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel::parity {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kSteps = muster::testing::kSanitized ? 6 : 25;
constexpr PipelineSchedule kGPipe = PipelineSchedule::kGPipe;
constexpr PipelineSchedule k1F1B = PipelineSchedule::kOneForwardOneBackward;
constexpr PipelineSchedule kInterleaved = PipelineSchedule::kInterleaved;
constexpr PipelineSchedule kZeroBubble = PipelineSchedule::kZeroBubble;

class PipelineParity : public ::testing::Test {
 protected:
  // Six blocks: with embedding and head, eight parts.
  const ModelDescription llama_ = SmallLlama(6), gpt2_ = SmallGpt2(6);

  static Case Alone(const ModelDescription& model) {
    Case run;
    run.model = model;
    run.layout.global_batch = 16;
    run.layout.micro_batch = 2;
    run.steps = kSteps;
    run.evaluate_every = kSteps;
    return run;
  }
  static Case Pipeline(const ModelDescription& model, int stages, PipelineSchedule schedule = k1F1B,
                       int data = 1, int zero = 0) {
    Case run = Alone(model);
    run.layout.degrees = PerAxis(stages, data, 1, 1);
    run.schedule = schedule;
    run.layout.pipeline_chunks = schedule == kInterleaved ? 2 : 1;
    run.layout.zero = zero;
    return run;
  }
  RankResult Train(const Case& run) { return harness_.Train(run)[0]; }
  // Expects that each run has the bits of the first one.
  void ExpectSameBitsAsFirst(const std::vector<Case>& runs) {
    const RankResult first = Train(runs[0]);
    for (size_t i = 1; i < runs.size(); ++i) {
      SCOPED_TRACE(runs[i].ToString());
      ExpectSameBits(first, Train(runs[i]));
    }
  }

  Harness harness_;
};

TEST_F(PipelineParity, Llama_EverySchedule_TrainsBitEqualToOneRank) {
  const RankResult alone = Train(Alone(llama_));
  EXPECT_LT(alone.losses.back(), alone.losses.front());
  ExpectSameBitsAsFirst({Alone(llama_), Pipeline(llama_, 2, kGPipe), Pipeline(llama_, 2),
                         Pipeline(llama_, 4), Pipeline(llama_, 2, kInterleaved),
                         Pipeline(llama_, 4, kInterleaved), Pipeline(llama_, 2, kZeroBubble),
                         Pipeline(llama_, 4, kZeroBubble), Pipeline(llama_, 8, kZeroBubble)});
}

// The gradients of several chunks, or those of blocks and head, become ready alternately.
TEST_F(PipelineParity, Llama_EveryScheduleWithDataAndZero_TrainsBitEqualToOneRank) {
  std::vector<Case> runs = {Alone(llama_), Pipeline(llama_, 2, kGPipe, 4)};
  for (int zero = 0; zero <= 3; ++zero) {
    for (const PipelineSchedule schedule : {k1F1B, kInterleaved, kZeroBubble}) {
      runs.push_back(Pipeline(llama_, 2, schedule, 2, zero));
    }
  }
  runs.push_back(Pipeline(llama_, 4, kZeroBubble, 2, 3));
  ExpectSameBitsAsFirst(runs);
}

// Each of the two stages that hold a tied table sums its gradient over micro-batches and ranks;
// then the two sums are added. That order is the same for all pipelines, whatever their stages,
// schedule and ZeRO. A rank that holds both ends adds the gradients of embedding and head for each
// micro-batch: sum(h_i + e_i), which fp32 rounds differently from sum(h_i) + sum(e_i). The same
// order would take a second accumulator of the table's size there, or an exchange of the table's
// gradient for every micro-batch here.
TEST_F(PipelineParity, Gpt2_TiedAcrossStages_HasTheBitsOfEveryPipelineAndAgreesWithOneRank) {
  std::vector<Case> runs = {Pipeline(gpt2_, 2),
                            Pipeline(gpt2_, 4, k1F1B, 2),
                            Pipeline(gpt2_, 2, kInterleaved),
                            Pipeline(gpt2_, 4, kZeroBubble),
                            Pipeline(gpt2_, 2, k1F1B, 2, 1),
                            Pipeline(gpt2_, 2, kInterleaved, 2, 2),
                            Pipeline(gpt2_, 2, kZeroBubble, 2, 3)};
  Case replicated = Pipeline(gpt2_, 2, kZeroBubble, 4, 1);
  replicated.layout.zero_shards = 2;
  runs.push_back(replicated);
  ExpectSameBitsAsFirst(runs);
  Case alone = Alone(gpt2_), two = runs[0];
  alone.steps = two.steps = 2 * kSteps;
  ExpectClose(Train(alone), Train(two));
  ExpectClose(harness_.FirstGradients(Alone(gpt2_)), harness_.FirstGradients(runs.back()));
}

// With one micro-batch, both orders are the same for rows of the table that are read once.
TEST_F(PipelineParity, Gpt2_TiedTableReadOnce_HasTheGradientOfOneRankToTheLastBit) {
  Case alone = Alone(gpt2_);
  alone.layout.global_batch = 1;
  alone.layout.micro_batch = 1;
  Case run = Pipeline(gpt2_, 2);
  run.layout = alone.layout;
  run.layout.degrees = PerAxis(2, 1, 1, 1);
  const std::string table = "embedding.token.weight";
  const Tensors expected = harness_.FirstGradients(alone), found = harness_.FirstGradients(run);
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [name, values] : expected) {
    if (name == table) continue;
    EXPECT_EQ(found.at(name), values) << name;
  }
  const std::vector<float>&a = expected.at(table), &b = found.at(table);
  const size_t width = a.size() / Harness::kVocab;
  int rows_apart = 0;
  for (size_t row = 0; row < Harness::kVocab; ++row) {
    rows_apart += !std::equal(a.begin() + row * width, a.begin() + (row + 1) * width,
                              b.begin() + row * width);
  }
  // Only rows of tokens that the sample has twice may differ.
  EXPECT_LE(rows_apart, Harness::kSequence / 2);
}

TEST_F(PipelineParity, WithoutOverlap_IsBitEqual) {
  for (const PipelineSchedule schedule : {k1F1B, kZeroBubble}) {
    Case run = Pipeline(llama_, 2, schedule, 2), without = run;
    without.overlap = false;
    ExpectSameBitsAsFirst({run, without});
  }
}

// Pipelines alone and with the other axes.
TEST_F(PipelineParity, Tcp_IsBitEqualToLocal) {
  for (const auto& [schedule, degrees, zero] :
       std::vector<std::tuple<PipelineSchedule, PerAxis, int>>{
           {kZeroBubble, PerAxis(4, 1, 1, 1), 0},
           {kZeroBubble, PerAxis(2, 2, 1, 1), 3},
           {kInterleaved, PerAxis(2, 2, 1, 1), 2},
           {kZeroBubble, PerAxis(2, 1, 1, 2), 0},
           {k1F1B, PerAxis(2, 1, 2, 1), 1}}) {
    Case local = Pipeline(gpt2_, 2, schedule, 1, zero);
    local.layout.degrees = degrees;
    local.layout.sequence_parallel = degrees[Axis::kTensor] > 1;
    local.steps = 5;
    Case tcp = local;
    tcp.tcp = true;
    ExpectSameBitsAsFirst({local, tcp});
  }
}

TEST_F(PipelineParity, Checkpoints_ReloadAcrossPipelineDegrees) {
  for (const ModelDescription& model : {llama_, gpt2_}) {
    SCOPED_TRACE(model.family);
    const RankResult whole = Train(Alone(model));
    Case first = Pipeline(model, 4, kZeroBubble), second = Pipeline(model, 2, kInterleaved),
         third = Alone(model);
    first.save_every = second.save_every = kSteps / 3;
    first.stop_after = kSteps / 3;
    second.stop_after = 2 * (kSteps / 3);
    second.restore = Train(first).saved;
    ASSERT_EQ(second.restore.size(), 1u);
    third.restore = Train(second).saved;
    ASSERT_EQ(third.restore.size(), 1u);
    third.layout.degrees[Axis::kData] = 2;
    const RankResult rest = Train(third);
    ASSERT_EQ(rest.losses.size(), kSteps - 2 * (kSteps / 3));
    ExpectClose(whole, rest);
  }
}

TEST_F(PipelineParity, ZeroBubbleWithContextAndTensorRanks_IsBitEqualToOtherSchedules) {
  for (const ModelDescription& model : {llama_, gpt2_}) {
    for (const PerAxis& degrees : {PerAxis(2, 1, 2, 1), PerAxis(2, 1, 1, 2), PerAxis(2, 2, 1, 2)}) {
      Case run = Pipeline(model, 2), split = Pipeline(model, 2, kZeroBubble);
      for (Case* each : {&run, &split}) {
        each->layout.degrees = degrees;
        each->layout.sequence_parallel = degrees[Axis::kData] == 2;
        each->layout.zero = degrees[Axis::kData] == 2 ? 1 : 0;
        each->steps = std::min<int64_t>(kSteps, 10);
      }
      ExpectSameBitsAsFirst({run, split});
    }
  }
}

TEST_F(PipelineParity, LayoutsThatCannotWork_AreRefusedWithTheReason) {
  Case split = Pipeline(llama_, 2, kZeroBubble);
  split.recompute = Recompute::kSelective;
  split.may_fail = true;
  EXPECT_THAT(Train(split).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("use recompute none")));
  Case shared = Alone(llama_);
  shared.layout.degrees[Axis::kContext] = 8;
  shared.context_method = ContextMethod::kAllToAll;
  shared.may_fail = true;
  EXPECT_THAT(Train(shared).status,
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("12 heads")));
  EXPECT_THAT(StageParts(llama_, 4, 3, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("4 pipeline stages x 3 chunks: 8 layers")));
}

TEST(StageParts, LargeHead_GetsFewerBlocks) {
  ModelDescription description = SmallGpt2();
  description.sizes = {
      {"layers", 12}, {"hidden", 768}, {"heads", 12}, {"vocab", 50257}, {"sequence_length", 1024}};
  ASSERT_OK_AND_ASSIGN(const ModelParallel last, StageParts(description, 2, 1, 1));
  EXPECT_EQ(last.parts[0].begin, 9);  // the embedding and eight blocks; four blocks and the head
  EXPECT_EQ(last.parts[0].end, 14);
}

}  // namespace
}  // namespace muster::parallel::parity
