// A run on any pipeline trains like one without: fp32 on CPU ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/mesh/mesh.h"
#include "parallel/pipeline/stages.h"
#include "parallel/train/trainer.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

constexpr int64_t kSteps = 50;
constexpr int64_t kSequence = 16;

const ModelDescription kGpt2 = {
    "gpt2",
    {{"layers", 6}, {"hidden", 24}, {"heads", 3}, {"vocab", 61}, {"sequence_length", kSequence}},
    {},
    {}};
const ModelDescription kLlama = {"llama",
                                 {{"layers", 6},
                                  {"hidden", 24},
                                  {"heads", 6},
                                  {"kv_heads", 2},
                                  {"ffn", 40},
                                  {"vocab", 61},
                                  {"sequence_length", kSequence}},
                                 {{"norm_epsilon", 1e-5}, {"rope_theta", 10000}},
                                 {{"tied", false}}};

struct Layout {
  int pipeline = 1;
  int data = 1;
  PipelineSchedule schedule = PipelineSchedule::kOneForwardOneBackward;
  int chunks = 1;
  int zero = 0;
  int zero_shards = 1;
  int context = 1;
  ContextMethod method = ContextMethod::kRing;
};

std::string Describe(const Layout& layout) {
  return absl::StrCat(Name(layout.schedule), ", pipeline ", layout.pipeline, ", data ", layout.data,
                      ", chunks ", layout.chunks, ", zero ", layout.zero, ", context ",
                      layout.context, " by ", Name(layout.method));
}

struct Curve {
  std::vector<double> losses, norms;
  std::map<int64_t, double> validation;
  std::vector<RestoreCandidate> saved;
  absl::Status status;
};

class Recorder : public TrainerHooks {
 public:
  Recorder(Curve& curve, int64_t stop_after) : curve_(curve), stop_after_(stop_after) {}
  void OnStep(const StepReport& report) override {
    curve_.losses.push_back(report.loss);
    curve_.norms.push_back(report.gradient_norm);
    step_ = report.step;
  }
  void OnEvaluation(const EvaluationReport& report) override {
    curve_.validation[report.step] = report.loss;
  }
  void OnSaved(const SavedCheckpoint& saved) override {
    curve_.saved.insert(curve_.saved.begin(),
                        {saved.id, saved.result.directory, saved.result.manifest_checksum});
  }
  bool StopRequested() override { return stop_after_ > 0 && step_ + 1 >= stop_after_; }

 private:
  Curve& curve_;
  const int64_t stop_after_;
  int64_t step_ = 0;
};

class PipelineParity : public ::testing::Test {
 protected:
  void SetUp() override {
    const ::testing::TestInfo& info = *::testing::UnitTest::GetInstance()->current_test_info();
    directory_ =
        absl::StrCat(::testing::TempDir(), "/muster-pipeline-", getpid(), "-", info.name());
    ASSERT_OK(files_->RemoveTree(directory_));
    ASSERT_OK(files_->MakeDirectory(directory_));
    MakeData("train", 20000, 1);
    MakeData("validation", 700, 2);
    const SamplerOptions sampling = {kSequence, 61, 9};
    training_ = std::make_unique<Sampler>(*Sampler::Training({{datasets_[0].get(), 1}}, sampling));
    validation_ =
        std::make_unique<Sampler>(*Sampler::Evaluation({{datasets_[1].get(), 1}}, sampling));
    options_.steps = kSteps;
    options_.global_batch = 16;
    options_.micro_batch = 2;
    options_.seed = 77;
    options_.schedule = {Decay::kCosine, 5e-3, 5e-4, 5, kSteps};
    options_.bucket_bytes = 8192;
    options_.evaluate_every = 25;
    options_.job = JobId("pipeline-abcde");
    options_.epoch = Epoch(1);
  }
  void TearDown() override { ASSERT_OK(files_->RemoveTree(directory_)); }

  // A chain over 61 tokens that is followed four times out of five.
  void MakeData(const std::string& name, int64_t tokens, uint64_t seed) {
    const std::string prefix = absl::StrCat(directory_, "/", name);
    auto writer = *IndexedDatasetWriter::Create(*files_, prefix, TokenType::kU8);
    Rng rng(seed);
    std::vector<int32_t> text = {1};
    while (static_cast<int64_t>(text.size()) < tokens) {
      const int32_t likely = (text.back() * 7 + 1) % 61;
      text.push_back(rng.Chance(0.8) ? likely : static_cast<int32_t>(rng.Below(61)));
    }
    CHECK_OK(writer->Append(text));
    CHECK_OK(writer->EndDocument());
    CHECK_OK(writer->Finish());
    datasets_.push_back(*IndexedDataset::Open(prefix));
  }

  Curve RunRank(const ModelDescription& description, const Layout& layout, Communicator& world,
                const std::vector<RestoreCandidate>& restore) {
    Curve curve;
    const auto device = kernels::MakeCpuDevice(1);
    const Mesh mesh = *Mesh::Make(
        {.degrees = PerAxis(layout.pipeline, layout.data, layout.context, 1)}, world.size());
    const int stage = mesh.CoordinateOf(world.rank())[Axis::kPipeline];
    ModelParallel parallel = *StageParts(description, layout.pipeline, layout.chunks, stage);
    parallel.context_size = layout.context;
    parallel.context_method = layout.method;
    parallel.split_backward =
        layout.schedule == PipelineSchedule::kZeroBubble && layout.pipeline > 1;
    const auto model = *MakeModel(description, parallel);
    TrainerOptions options = options_;
    options.pipeline_schedule = layout.schedule;
    options.zero = layout.zero;
    Recorder hooks(curve, world.rank() == 0 ? stop_after_ : 0);
    const auto groups = *MeshGroups::Make(mesh, world, layout.zero_shards);
    auto trainer = Trainer::Make(options, *model, *device, *groups, *training_, validation_.get(),
                                 *files_, hooks);
    curve.status = trainer.status();
    if (curve.status.ok()) curve.status = (*trainer)->Restore(restore);
    if (curve.status.ok()) curve.status = (*trainer)->Run().status();
    if (!curve.status.ok()) world.Abort(curve.status);
    return curve;
  }

  // Rank 0's curve, which all ranks must share.
  Curve Train(const ModelDescription& description, const Layout& layout,
              const std::vector<RestoreCandidate>& restore = {}) {
    const int ranks = layout.pipeline * layout.data * layout.context;
    auto world = MakeLocalCommunicators(ranks, absl::Seconds(60));
    std::vector<Curve> curves(ranks);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      threads.emplace_back(
          [&, rank] { curves[rank] = RunRank(description, layout, *world[rank], restore); });
    }
    for (std::thread& thread : threads) thread.join();
    for (const Curve& curve : curves) {
      EXPECT_EQ(curve.losses, curves[0].losses);
      EXPECT_EQ(curve.norms, curves[0].norms);
    }
    return curves[0];
  }

  static void ExpectSameBits(const Curve& expected, const Curve& actual) {
    ASSERT_OK(expected.status);
    ASSERT_OK(actual.status);
    EXPECT_EQ(actual.losses, expected.losses);
    EXPECT_EQ(actual.norms, expected.norms);
    EXPECT_EQ(actual.validation, expected.validation);
  }
  // `actual` may cover the last steps only.
  static void ExpectClose(const Curve& expected, const Curve& actual, double tolerance) {
    ASSERT_OK(expected.status);
    ASSERT_OK(actual.status);
    ASSERT_FALSE(actual.losses.empty());
    const size_t skipped = expected.losses.size() - actual.losses.size();
    for (size_t i = 0; i < actual.losses.size(); ++i) {
      EXPECT_NEAR(actual.losses[i] / expected.losses[i + skipped], 1, tolerance) << "step " << i;
      EXPECT_NEAR(actual.norms[i] / expected.norms[i + skipped], 1, tolerance) << "step " << i;
    }
    for (const auto& [step, loss] : actual.validation) {
      EXPECT_NEAR(loss / expected.validation.at(step), 1, tolerance);
    }
  }

  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::string directory_;
  std::vector<std::unique_ptr<IndexedDataset>> datasets_;
  std::unique_ptr<Sampler> training_, validation_;
  TrainerOptions options_;
  int64_t stop_after_ = 0;
};

TEST_F(PipelineParity, Llama_EverySchedule_TrainsBitEqualToOneRank) {
  const Curve alone = Train(kLlama, {});
  EXPECT_LT(alone.losses.back(), alone.losses.front());
  for (const Layout& layout : {
           Layout{.pipeline = 2, .schedule = PipelineSchedule::kGPipe},
           Layout{.pipeline = 2},
           Layout{.pipeline = 4},
           Layout{.pipeline = 2, .schedule = PipelineSchedule::kZeroBubble},
           Layout{.pipeline = 4, .schedule = PipelineSchedule::kZeroBubble},
           Layout{.pipeline = 8, .schedule = PipelineSchedule::kZeroBubble},
           Layout{.pipeline = 2, .schedule = PipelineSchedule::kInterleaved, .chunks = 2},
           Layout{.pipeline = 4, .schedule = PipelineSchedule::kInterleaved, .chunks = 2},
       }) {
    SCOPED_TRACE(Describe(layout));
    ExpectSameBits(alone, Train(kLlama, layout));
  }
}

TEST_F(PipelineParity, Llama_PipelineTimesData_TrainsBitEqualToOneRank) {
  const Curve alone = Train(kLlama, {});
  for (const Layout& layout : {
           Layout{.pipeline = 2, .data = 2},
           Layout{.pipeline = 2, .data = 4, .schedule = PipelineSchedule::kGPipe},
           Layout{.pipeline = 2,
           .data = 2,
           .schedule = PipelineSchedule::kInterleaved,
           .chunks = 2,
           .zero = 1,
           .zero_shards = 2},
           Layout{.pipeline = 2, .data = 2, .zero = 2, .zero_shards = 2},
           Layout{.pipeline = 2, .data = 2, .zero = 3, .zero_shards = 2},
       }) {
    SCOPED_TRACE(Describe(layout));
    ExpectSameBits(alone, Train(kLlama, layout));
  }
  // Gradients of several chunks, or of blocks and head, come in turns.
  for (int zero = 0; zero <= 3; ++zero) {
    for (Layout layout :
         {Layout{.pipeline = 2, .schedule = PipelineSchedule::kZeroBubble},
          Layout{.pipeline = 4, .schedule = PipelineSchedule::kZeroBubble},
          Layout{.pipeline = 2, .schedule = PipelineSchedule::kInterleaved, .chunks = 2}}) {
      layout.data = 2;
      layout.zero = zero;
      layout.zero_shards = zero > 0 ? 2 : 1;
      SCOPED_TRACE(Describe(layout));
      ExpectSameBits(alone, Train(kLlama, layout));
    }
  }
}

TEST_F(PipelineParity, ZeroBubble_GoesWithContextParallelismAndTiedTables) {
  for (const ModelDescription& description : {kLlama, kGpt2}) {
    const Layout layout = {.pipeline = 2, .data = 2, .context = 2};
    Layout split = layout;
    split.schedule = PipelineSchedule::kZeroBubble;
    ExpectSameBits(Train(description, layout), Train(description, split));
  }
}

// The tied table's gradient is summed over the stages last: another order, the same up to rounding.
TEST_F(PipelineParity, Gpt2_TiedAcrossStages_AgreesWithOneRank) {
  const Curve alone = Train(kGpt2, {});
  for (const Layout& layout : {
           Layout{.pipeline = 2},
           Layout{.pipeline = 4, .data = 2},
           Layout{.pipeline = 2, .schedule = PipelineSchedule::kInterleaved, .chunks = 2},
       }) {
    SCOPED_TRACE(Describe(layout));
    ExpectClose(alone, Train(kGpt2, layout), 1e-5);
  }
}

TEST_F(PipelineParity, WithoutOverlap_IsBitEqual) {
  const Layout layout = {.pipeline = 2, .data = 2};
  const Curve overlapped = Train(kLlama, layout);
  options_.overlap = false;
  ExpectSameBits(overlapped, Train(kLlama, layout));
}

TEST_F(PipelineParity, Checkpoints_ReloadAcrossPipelineDegrees) {
  for (const ModelDescription& description : {kLlama, kGpt2}) {
    SCOPED_TRACE(description.family);
    options_.checkpoint_root.clear();
    options_.epoch = Epoch(1);
    stop_after_ = 0;
    const Curve whole = Train(description, {});
    options_.checkpoint_root = absl::StrCat(directory_, "/", description.family);
    options_.checkpoint_every = 15;
    options_.checkpoint_keep = 100;
    stop_after_ = 15;
    const Curve first = Train(description, {.pipeline = 4});
    ASSERT_EQ(first.saved.size(), 1u);
    options_.epoch = Epoch(2);
    stop_after_ = 30;
    const Curve second =
        Train(description, {.pipeline = 2, .schedule = PipelineSchedule::kInterleaved, .chunks = 2},
              first.saved);
    ASSERT_FALSE(second.saved.empty());
    options_.epoch = Epoch(3);
    stop_after_ = 0;
    const Curve third = Train(description, {.data = 2}, second.saved);
    ASSERT_EQ(third.losses.size(), 20u);
    ExpectClose(whole, third, 1e-5);
  }
}

TEST_F(PipelineParity, SequencesSharedByRanks_TrainLikeOnOneRank) {
  for (const ModelDescription& description : {kLlama, kGpt2}) {
    SCOPED_TRACE(description.family);
    const Curve alone = Train(description, {});
    for (const Layout& layout : {
             Layout{.context = 2},
             Layout{.context = 2, .method = ContextMethod::kAllGather},
             Layout{.data = 2, .context = 4},
             Layout{.pipeline = 2, .data = 2, .context = 2},
         }) {
      SCOPED_TRACE(Describe(layout));
      ExpectClose(alone, Train(description, layout), 1e-5);
    }
  }
  const Curve llama = Train(kLlama, {});
  for (const Layout& layout : {
           Layout{.context = 2, .method = ContextMethod::kAllToAll},
           Layout{.data = 2, .zero = 2, .zero_shards = 4, .context = 2},
       }) {
    SCOPED_TRACE(Describe(layout));
    ExpectClose(llama, Train(kLlama, layout), 1e-5);
  }
}

TEST_F(PipelineParity, LayoutsThatCannotWork_AreRefusedWithTheReason) {
  EXPECT_THAT(Train(kGpt2, {.pipeline = 2, .data = 2, .zero = 1, .zero_shards = 2}).status,
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("needs zero 0, not 1")));
  ModelParallel split;
  split.split_backward = true;
  split.recompute = Recompute::kSelective;
  EXPECT_THAT(MakeModel(kLlama, split).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("use recompute none")));
  ModelParallel shared;
  shared.context_size = 4;
  shared.context_method = ContextMethod::kAllToAll;
  EXPECT_THAT(MakeModel(kLlama, shared).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("6 heads")));
  EXPECT_THAT(StageParts(kLlama, 4, 3, 0),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("4 pipeline stages x 3 chunks: 8 layers")));
}

TEST(StageParts, LargeHead_GetsFewerBlocks) {
  ModelDescription description = kGpt2;
  description.sizes = {
      {"layers", 12}, {"hidden", 768}, {"heads", 12}, {"vocab", 50257}, {"sequence_length", 1024}};
  ASSERT_OK_AND_ASSIGN(const ModelParallel last, StageParts(description, 2, 1, 1));
  EXPECT_EQ(last.parts[0].begin, 9);  // the embedding and eight blocks; four blocks and the head
  EXPECT_EQ(last.parts[0].end, 14);
}

}  // namespace
}  // namespace muster::parallel
