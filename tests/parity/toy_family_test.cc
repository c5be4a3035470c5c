// A family is one object on either side of a model's description: all else in the engine and in the
// plans follows from it. Here that object, and the mixer of its layers, exist in this program only.
#include "tests/parity/toy_family.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/traffic.h"
#include "kernels/device/device.h"
#include "parallel/interop/hugging_face_names.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/pipeline/stages.h"
#include "proto/spec/spec.h"
#include "tests/parity/harness.h"
#include "tests/support/status_matchers.h"
#include "worker/rank/balance.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/plan_advice.h"
#include "worker/rank/stage_blocks.h"

namespace muster::parallel::parity {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

ModelDescription SmallToy(int layers = 4) {
  return {.family = "toy",
          .sizes = {{"layers", layers},
                    {"hidden", 44},
                    {"heads", 4},
                    {"ffn", 72},
                    {"vocab", Harness::kVocab},
                    {"sequence_length", Harness::kSequence}}};
}

// A job that trains it.
v1::JobSpec ToyJob(int pipeline, int data, int tensor) {
  v1::JobSpec spec;
  spec.set_name("toy");
  spec.set_working_directory("/");
  v1::EngineSpec& engine = *spec.mutable_engine();
  v1::ModelSpec& model = *engine.mutable_model();
  model.set_family(v1::MODEL_FAMILY_LLAMA);
  EXPECT_EQ(std::string(kToyFamilyInSpecs), "llama");
  model.set_layers(4);
  model.set_hidden(44);
  model.set_heads(4);
  model.set_ffn(72);
  model.set_vocab(Harness::kVocab);
  model.set_sequence_length(Harness::kSequence);
  engine.mutable_data()->add_train()->set_path("/data/text");
  v1::TrainingSpec& training = *engine.mutable_training();
  training.set_steps(10);
  training.set_global_batch(16);
  training.set_micro_batch(2);
  training.mutable_optimizer()->mutable_adamw()->set_lr(1e-3);
  v1::ParallelSpec& parallel = *engine.mutable_parallel();
  parallel.set_pipeline(pipeline);
  parallel.set_data(data);
  parallel.set_tensor(tensor);
  spec.mutable_resources()->set_ranks(pipeline * data * tensor);
  spec::ApplyDefaults(spec);
  return spec;
}

class ToyFamily : public ::testing::Test {
 protected:
  static Case Run(const PerAxis& degrees) {
    Case run;
    run.model = SmallToy();
    run.layout.degrees = degrees;
    run.layout.global_batch = 16;
    run.layout.micro_batch = 2;
    run.steps = 8;
    return run;
  }
  // Every run also compares the memory that the trainer takes with PredictMemory.
  Harness harness_;
};

TEST_F(ToyFamily, CountsFollowFromTheKindsOfItsLayers) {
  ASSERT_OK_AND_ASSIGN(const auto model, MakeModel(SmallToy()));
  const int64_t square = 2 * 72 * 44, attention = 4 * 44 * 44;
  const int64_t tables = 2 * Harness::kVocab * 44, norms = 5 * 44, scales = 2 * 72 * 4;
  EXPECT_EQ(model->parameters().elements(), 2 * (square + attention) + tables + norms + scales);
  // Causal attention: half of two products of heads with the sequence.
  const int64_t scores = 2 * Harness::kSequence * 44;
  EXPECT_EQ(model->training_flops_per_token(),
            6 * (2 * (square + attention) + tables / 2) + 2 * 3 * (scores + 2 * 72));
  EXPECT_THAT(*BlockCosts(SmallToy()),
              ElementsAre(0, square + 72, attention + scores / 2, square + 72,
                          attention + scores / 2, Harness::kVocab * 44));
  const BlockKinds kinds = KindsOfBlocks(ConfigOf(SmallToy()));
  EXPECT_THAT(kinds.of_block, ElementsAre(0, 1, 0, 1));
  EXPECT_THAT(kinds.first_block, ElementsAre(0, 1));
  ModelDescription unknown = SmallToy();
  unknown.family = "llama";
  EXPECT_THAT(MakeModel(unknown).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("known: gpt2, toy")));
  EXPECT_THAT(LayoutForHuggingFace(*model).status(),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("'toy'")));
}

TEST_F(ToyFamily, RanksOfData_HaveTheBitsOfOneRank) {
  const RankResult alone = harness_.Train(Run(PerAxis(1, 1, 1, 1)))[0];
  EXPECT_LT(alone.losses.back(), alone.losses.front());
  for (const int zero : {0, 1, 3}) {
    Case run = Run(PerAxis(1, 2, 1, 1));
    run.layout.zero = zero;
    ExpectSameBits(alone, harness_.Train(run)[0]);
  }
  Case again = Run(PerAxis(1, 1, 1, 1));
  again.recompute = Recompute::kFull;
  ExpectSameBits(alone, harness_.Train(again)[0]);
}

TEST_F(ToyFamily, StagesOfAPipeline_HaveTheBitsOfOneRank) {
  const RankResult alone = harness_.Train(Run(PerAxis(1, 1, 1, 1)))[0];
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kOneForwardOneBackward, PipelineSchedule::kZeroBubble}) {
    Case run = Run(PerAxis(2, 1, 1, 1));
    run.schedule = schedule;
    ExpectSameBits(alone, harness_.Train(run)[0]);
  }
}

TEST_F(ToyFamily, TensorAndContextRanks_HaveTheGradientsAndLossesOfOneRank) {
  const Case alone = Run(PerAxis(1, 1, 1, 1));
  const RankResult whole = harness_.Train(alone)[0];
  const Tensors gradients = harness_.FirstGradients(alone);
  EXPECT_EQ(gradients.count("blocks.0.square.scale"), 1u);
  std::vector<Case> runs = {Run(PerAxis(1, 1, 1, 2)), Run(PerAxis(1, 1, 1, 2)),
                            Run(PerAxis(1, 1, 2, 1)), Run(PerAxis(1, 2, 1, 2))};
  runs[1].tensor_weights = {3, 1};
  runs[1].layout.sequence_parallel = true;
  runs[3].layout.zero = 3;
  for (const Case& run : runs) {
    SCOPED_TRACE(run.ToString());
    ExpectClose(whole, harness_.Train(run)[0]);
    ExpectClose(gradients, harness_.FirstGradients(run));
  }
}

TEST_F(ToyFamily, BytesSent_ArePredicted) {
  for (const PerAxis& degrees :
       {PerAxis(1, 2, 1, 1), PerAxis(1, 1, 1, 2), PerAxis(1, 1, 2, 1), PerAxis(2, 1, 1, 1)}) {
    Case run = Run(degrees);
    SCOPED_TRACE(run.ToString());
    run.steps = 2;
    const std::vector<RankResult> shorter = harness_.Train(run);
    run.steps = 3;
    const std::vector<RankResult> longer = harness_.Train(run);
    for (int rank = 0; rank < run.ranks(); ++rank) {
      const auto step = [&](int64_t RankResult::*bytes) {
        return longer[rank].*bytes - shorter[rank].*bytes;
      };
      const StepVolume& predicted = longer[rank].predicted;
      EXPECT_EQ(step(&RankResult::pipeline_bytes), predicted.pipeline);
      EXPECT_EQ(step(&RankResult::context_bytes), predicted.context);
      EXPECT_EQ(step(&RankResult::tensor_bytes), predicted.tensor);
      EXPECT_EQ(step(&RankResult::replica_bytes), predicted.replicas);
      EXPECT_GT(predicted.total(), 0);
    }
  }
}

TEST_F(ToyFamily, Checkpoint_GoesOnInAnotherLayout) {
  const RankResult whole = harness_.Train(Run(PerAxis(1, 1, 1, 1)))[0];
  Case first = Run(PerAxis(1, 1, 1, 2));
  first.tensor_weights = {3, 1};  // the scales [F,2,2] are cut unevenly
  first.save_every = 100;
  first.stop_after = 4;
  for (const PerAxis& degrees : {PerAxis(1, 2, 1, 1), PerAxis(2, 1, 1, 2)}) {
    Case second = Run(degrees);
    second.layout.zero = degrees[Axis::kData] > 1 ? 3 : 0;
    SCOPED_TRACE(second.ToString());
    second.restore = harness_.Train(first)[0].saved;
    ASSERT_THAT(second.restore, SizeIs(1));
    const RankResult rest = harness_.Train(second)[0];
    ASSERT_EQ(rest.losses.size() + 4, whole.losses.size());
    for (size_t i = 0; i < rest.losses.size(); ++i) {
      EXPECT_NEAR(rest.losses[i], whole.losses[i + 4], 1e-5 * whole.losses[i + 4]);
    }
  }
}

TEST_F(ToyFamily, SpecsOfIt_AreCheckedDescribedAndPlaced) {
  v1::JobSpec spec = ToyJob(1, 1, 2);
  EXPECT_OK(spec::Validate(spec));
  EXPECT_EQ(spec::Describe(spec.engine().model()), SmallToy());
  const spec::LayerTotals totals = spec::TotalsOf(spec.engine().model());
  EXPECT_EQ(totals.layers, 4);
  EXPECT_EQ(totals.weights, 2 * (2 * 72 * 44 + 4 * 44 * 44));
  coordinator::WaitingJob job;
  job.ranks = 2;
  coordinator::AddTraffic(spec, job);
  ASSERT_THAT(job.traffic, SizeIs(1));
  // Four layers, each twice an all-reduce of the hidden states of 16 samples.
  EXPECT_EQ(job.traffic[0].bytes, 2 * 4 * 16 * Harness::kSequence * 44 * 4);
  spec.mutable_engine()->mutable_model()->set_heads(5);
  EXPECT_THAT(spec::Validate(spec).message(), HasSubstr("5 does not divide hidden (44)"));
  spec = ToyJob(1, 1, 1);
  spec.mutable_engine()->mutable_model()->set_tied(false);  // no family here has it
  spec.mutable_engine()->mutable_model()->set_ffn(0);
  spec::ApplyDefaults(spec);
  EXPECT_EQ(spec.engine().model().ffn(), 88);
}

TEST_F(ToyFamily, Plans_TakeItsMemoryAndCostsFromTheEngine) {
  const v1::JobSpec spec = ToyJob(2, 1, 2);
  ASSERT_OK_AND_ASSIGN(const worker::JobPlan plan, worker::PlanJob(spec));
  ASSERT_OK_AND_ASSIGN(const auto model, MakeModel(SmallToy()));
  EXPECT_EQ(plan.parameters, model->parameters().elements());
  EXPECT_EQ(plan.flops_per_token, model->training_flops_per_token());
  EXPECT_THAT(plan.ranks, SizeIs(4));  // 131 rows of a table are not even
  EXPECT_THAT(worker::KindsOf(spec.engine().model()), ::testing::Contains(1));
  // What the planner tries when it does not fit: the change keeps the job valid and makes it fit.
  const int64_t limit = plan.needed_bytes() * 95 / 100;
  const auto change = worker::CheapestFit(spec, limit);
  ASSERT_TRUE(change.has_value());
  EXPECT_LE(change->plan.needed_bytes(), limit);
  EXPECT_FALSE(change->settings.empty());
}

TEST_F(ToyFamily, Balance_TimesEveryKindOfItsBlocks) {
  const v1::JobSpec spec = ToyJob(2, 1, 1);
  const auto device = kernels::MakeCpuDevice(1);
  ASSERT_OK_AND_ASSIGN(const worker::RankMeasure measured,
                       worker::MeasureRank(spec, PerAxis(0, 0, 0, 0), *device));
  EXPECT_THAT(measured.kinds, SizeIs(2));
  EXPECT_EQ(measured.share, 2 * 72 * 44 + 72 * 4 + 4 * 44 * 44 + 2 * 44);
  // Times of the squares, the attentions and the head cut it where the times of both kinds say.
  const auto blocks = [](double square, double attention) {
    v1::JobSpec cut = ToyJob(2, 1, 1);
    worker::RankMeasure rank;
    rank.kinds = {square, attention};
    rank.block = square + attention;
    rank.head = 3;
    EXPECT_OK(worker::Even({rank, rank}, cut).status());
    const auto& numbers = cut.engine().parallel().pipeline_blocks();
    return std::vector<int>(numbers.begin(), numbers.end());
  };
  EXPECT_THAT(blocks(4, 1), ElementsAre(2, 2));
  EXPECT_THAT(blocks(1, 4), ElementsAre(3, 1));
}

}  // namespace
}  // namespace muster::parallel::parity
