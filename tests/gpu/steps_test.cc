// Training steps on one device give the same bits every time, launched op by op or replayed from a
// recording, in this process or another. The same tests run on the host, where they never skip (and
// nothing is recorded).
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/device/replay.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_norm.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"
#include "parallel/train/trainer.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kVocab = 61;
constexpr int64_t kSequence = 128;

// Head width 64, which cuDNN supports.
ModelDescription Gpt2() {
  return {.family = "gpt2",
          .sizes = {{"layers", 2},
                    {"hidden", 256},
                    {"heads", 4},
                    {"vocab", kVocab},
                    {"sequence_length", kSequence}}};
}
ModelDescription Llama() {
  ModelDescription model = Gpt2();
  model.family = "llama";
  model.sizes["kv_heads"] = 2;
  model.sizes["ffn"] = 512;
  model.numbers = {{"norm_epsilon", 1e-5}, {"rope_theta", 10000}};
  model.flags = {{"tied", false}};
  return model;
}

// Head width and state that the fused Hopper kernels take.
ModelDescription Mamba2() {
  return {.family = "mamba2",
          .sizes = {{"layers", 2},
                    {"hidden", 256},
                    {"heads", 8},
                    {"head_width", 64},
                    {"groups", 2},
                    {"state", 64},
                    {"taps", 4},
                    {"vocab", kVocab},
                    {"sequence_length", kSequence}},
          .numbers = {{"norm_epsilon", 1e-5}},
          .flags = {{"tied", true}}};
}

// Squared ReLU, no positions, heads wider together than the hidden state.
ModelDescription Hybrid() {
  return {.family = "hybrid",
          .sizes = {{"layers", 3},
                    {"hidden", 256},
                    {"heads", 6},
                    {"kv_heads", 2},
                    {"head_width", 64},
                    {"ffn", 512},
                    {"mamba_heads", 8},
                    {"mamba_head_width", 64},
                    {"mamba_groups", 2},
                    {"mamba_state", 64},
                    {"mamba_taps", 4},
                    {"vocab", kVocab},
                    {"sequence_length", kSequence}},
          .numbers = {{"norm_epsilon", 1e-5}},
          .flags = {{"tied", false}, {"rotary", false}},
          .texts = {{"pattern", "M-*M-"}, {"mlp", "relu2"}}};
}

// The parameter says whether to run on a GPU.
class StepsTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (!GetParam()) {
      device_ = kernels::MakeCpuDevice(2);
      return;
    }
    auto device = kernels::MakeCudaDevice(0);
    if (!device.ok()) GTEST_SKIP() << "NO GPU, NOT TESTED: " << device.status();
    device_ = *std::move(device);
  }
  DType compute() const { return GetParam() ? DType::kBF16 : DType::kF32; }

  // Returns master weights and moments after `steps`. With `documents`, attention is limited to
  // documents of a few tokens whose boundaries change with every step. The number of the first
  // sample advances by `samples` with each step.
  std::vector<float> Train(const ModelDescription& description, Recompute recompute, int steps,
                           bool record, bool documents = false, double dropout = 0,
                           int32_t samples = 3);

  std::unique_ptr<kernels::Device> device_;
  bool norm_with_products_ = false;
  std::vector<float> norms_;  // gradient norms of the last Train(), by step
};

std::vector<float> StepsTest::Train(const ModelDescription& description, Recompute recompute,
                                    int steps, bool record, bool documents, double dropout,
                                    int32_t samples) {
  const auto model =
      *MakeModel(description, {.recompute = recompute, .documents = documents, .dropout = dropout});
  const FlatLayout layout(model->parameters(), int64_t{1} << 20, 1);
  const auto stream = *device_->MakeStream();
  const auto flat = *FlatBuffers::Make(*device_, *stream, model->parameters(), layout,
                                       {.seed = 5, .compute = compute()});
  const BatchShape shape = {.batch = 3, .sequence = kSequence, .activation = compute()};
  kernels::Arena arena;
  model->TakeWorkspace(arena, shape);
  EXPECT_OK(arena.Commit(*device_));
  Workspace workspace = model->TakeWorkspace(arena, shape);
  const auto sums = *device_->Allocate(3 * sizeof(float));
  const auto norm =
      *GradientNorm::Make(*flat, *device_, *stream, {.with_gemms = norm_with_products_});
  const auto scalars = *device_->Allocate(sizeof(kernels::StepScalars));
  const auto sum = [&](int i, int64_t count = 1) {
    return Tensor(static_cast<float*>(sums->data()) + i, DType::kF32, {count});
  };
  const auto upload = [&](void* from, const Tensor& to) {
    kernels::Copy(*stream, Tensor(from, DType::kU8, {to.bytes()}),
                  Tensor(to.data(), DType::kU8, {to.bytes()}));
    EXPECT_OK(stream->Synchronize());
  };
  kernels::StepScalars values = {1e-3f, 0.1f, 0.05f, 1, 0};
  upload(&values, Tensor(scalars->data(), DType::kU8, {sizeof(values)}));
  auto* step_scalars = static_cast<kernels::StepScalars*>(scalars->data());

  const auto enqueue = [&] {
    const Pass pass = {.stream = *stream,
                       .weights = flat->parameter_views(),
                       .loss_scale = 1.0f / static_cast<float>(shape.tokens()),
                       .gradients = &flat->gradient_views(0),
                       .overwrite_gradients = true,
                       .squares = norm->squares(),
                       .dropout_seed = 5};
    model->Forward(pass, workspace);
    model->Backward(pass, workspace);
    norm->Sum(*stream, sum(0, 2));
    kernels::ClipCoefficient(*stream, sum(0), 1.0f, sum(2), step_scalars);
    for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
      kernels::AdamWArgs update = flat->update(i);
      update.weight_decay = 0.1f;
      update.scalars = step_scalars;
      kernels::AdamW(*stream, update);
    }
  };
  kernels::Replay replay(*stream);
  norms_.clear();
  std::mt19937 random(11), borders(12);
  for (int step = 0; step < steps; ++step) {
    std::vector<int32_t> tokens(shape.tokens());
    for (const Tensor& to : {workspace.batch.tokens, workspace.batch.targets}) {
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
      upload(tokens.data(), to);
    }
    if (documents) {
      std::vector<int32_t> begins(shape.tokens());
      for (int32_t i = 0; i < shape.tokens(); ++i) {
        const int32_t position = i % kSequence;
        begins[i] = position == 0 || borders() % 20 == 0 ? position : begins[i - 1];
      }
      upload(begins.data(), workspace.batch.documents);
    }
    if (dropout > 0) {
      int32_t words[] = {step * samples, 0};
      upload(words, workspace.batch.sample);
    }
    if (record) {
      replay.Run({}, enqueue);
    } else {
      enqueue();
    }
    norms_.push_back(0);
    kernels::Copy(*stream, sum(2), Tensor(&norms_.back(), DType::kF32, {1}));
    EXPECT_OK(stream->Synchronize());
  }
  EXPECT_EQ(replay.recordings(), record && GetParam() && steps > 1 ? 1 : 0);
  const int64_t n = layout.elements();
  const auto state = *device_->AllocateHost(3 * n * sizeof(float));
  const Tensor all(state->data(), DType::kF32, {3 * n});
  for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
    const FlatRange& range = layout.buckets()[i].range;
    flat->ReadMaster(*stream, i, 0, all.Rows(range.begin, range.size()));
  }
  kernels::Copy(*stream, flat->all_m(), all.Rows(n, n));
  kernels::Copy(*stream, flat->all_v(), all.Rows(2 * n, n));
  EXPECT_OK(stream->Synchronize());
  return std::vector<float>(all.f32(), all.f32() + 3 * n);
}

TEST_P(StepsTest, ThreeSteps_TwiceAndRecorded_LeaveTheSameBitsInEveryParameter) {
  for (const ModelDescription& description : {Gpt2(), Llama(), Mamba2(), Hybrid()}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective}) {
      SCOPED_TRACE(absl::StrCat(description.family, " ", static_cast<int>(recompute)));
      const std::vector<float> once = Train(description, recompute, 3, /*record=*/false);
      EXPECT_NE(once, Train(description, recompute, 2, /*record=*/false));
      for (const bool record : {false, true}) {
        const std::vector<float> again = Train(description, recompute, 3, record);
        ASSERT_EQ(once.size(), again.size());
        EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)), 0)
            << (record ? "recorded" : "op by op");
      }
    }
  }
}

TEST_P(StepsTest, NormInGemms_IsTheSameButForRoundingAndRepeatsItsBits) {
  for (const ModelDescription& description : {Gpt2(), Llama(), Mamba2(), Hybrid()}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective}) {
      SCOPED_TRACE(absl::StrCat(description.family, " ", static_cast<int>(recompute)));
      norm_with_products_ = false;
      Train(description, recompute, 1, /*record=*/false);
      const float apart = norms_.front();
      norm_with_products_ = true;
      const std::vector<float> once = Train(description, recompute, 4, /*record=*/false);
      const std::vector<float> norms = norms_;
      // Only the first step has gradients of the same weights.
      EXPECT_NEAR(norms.front() / apart, 1, 1e-6);
      EXPECT_GT(apart, 0.1);
      for (const bool record : {false, true}) {
        const std::vector<float> again = Train(description, recompute, 4, record);
        EXPECT_EQ(norms_, norms);
        ASSERT_EQ(once.size(), again.size());
        EXPECT_EQ(std::memcmp(once.data(), again.data(), once.size() * sizeof(float)), 0)
            << (record ? "recorded" : "op by op");
      }
    }
  }
}

// Each gradient counts once, whichever GEMMs leave its sum of squares.
TEST_P(StepsTest, NormInGemms_ReadsWhatTheyDoNotLeave) {
  const auto model = *MakeModel(Gpt2(), {});
  const ParameterRegistry& parameters = model->parameters();
  const FlatLayout layout(parameters, int64_t{1} << 20, 1);
  const auto stream = *device_->MakeStream();
  const auto flat = *FlatBuffers::Make(*device_, *stream, parameters, layout, {.seed = 5});
  const auto sums = *device_->Allocate(2 * sizeof(float));
  const Tensor pair(sums->data(), DType::kF32, {2});
  // Every partial sum starts from the same number other than zero.
  for (ParameterId id = 0; id < parameters.size(); ++id) {
    kernels::Copy(*stream, flat->parameter_views()[id], flat->gradient_views(0)[id]);
  }
  const auto sum_of = [&](GradientNorm& norm) {
    norm.Sum(*stream, pair);
    float halves[2];
    kernels::Copy(*stream, pair, Tensor(halves, DType::kF32, {2}));
    EXPECT_OK(stream->Synchronize());
    return double{halves[0]} + halves[1];
  };
  const double all = sum_of(**GradientNorm::Make(*flat, *device_, *stream, {}));
  EXPECT_GT(all, 1);
  for (const int every : {1, 2, 3, 100}) {
    const auto norm = *GradientNorm::Make(*flat, *device_, *stream, {.with_gemms = true});
    double first = 0;
    for (ParameterId id = 0; id < parameters.size(); ++id) {
      if (!parameters.at(id).by_gemm || id % every != 0) continue;
      const Tensor pairs = norm->squares()->pairs(id);
      kernels::SumSquaresPair(*stream, flat->gradient_views(0)[id],
                              Tensor(pairs.data(), DType::kF32, {2}), /*accumulate=*/false);
      norm->squares()->SetLeft(id, true);
    }
    first = sum_of(*norm);
    EXPECT_NEAR(first / all, 1, 1e-6) << every;
    EXPECT_EQ(sum_of(*norm), first);
  }
}

TEST_P(StepsTest, DocumentsThatChangeFromStepToStep_AreReadByRecordedStepsToo) {
  for (const ModelDescription& description : {Gpt2(), Llama(), Mamba2(), Hybrid()}) {
    SCOPED_TRACE(description.family);
    const auto train = [&](bool record, bool documents) {
      return Train(description, Recompute::kNone, 4, record, documents);
    };
    const std::vector<float> once = train(/*record=*/false, /*documents=*/true);
    EXPECT_NE(once, train(/*record=*/false, /*documents=*/false));
    const std::vector<float> recorded = train(/*record=*/true, /*documents=*/true);
    ASSERT_EQ(once.size(), recorded.size());
    EXPECT_EQ(std::memcmp(once.data(), recorded.data(), once.size() * sizeof(float)), 0);
  }
}

TEST_P(StepsTest, Dropout_DrawsAnewInEveryStepRecordedOnesToo) {
  for (const ModelDescription& description : {Gpt2(), Llama(), Mamba2(), Hybrid()}) {
    for (const Recompute recompute : {Recompute::kNone, Recompute::kFull}) {
      SCOPED_TRACE(absl::StrCat(description.family, " ", static_cast<int>(recompute)));
      const auto train = [&](bool record, double dropout, int32_t samples) {
        return Train(description, recompute, 4, record, /*documents=*/false, dropout, samples);
      };
      const std::vector<float> once = train(/*record=*/false, 0.1, 3);
      EXPECT_NE(once, train(/*record=*/false, 0, 3));
      EXPECT_NE(once, train(/*record=*/false, 0.1, 0)) << "the same masks in every step";
      const std::vector<float> recorded = train(/*record=*/true, 0.1, 3);
      ASSERT_EQ(once.size(), recorded.size());
      EXPECT_EQ(std::memcmp(once.data(), recorded.data(), once.size() * sizeof(float)), 0);
    }
  }
}

class Recorder : public TrainerHooks {
 public:
  void OnStep(const StepReport& report) override {
    numbers.push_back(report.loss);
    numbers.push_back(report.gradient_norm);
    reports.push_back(report);
  }
  void OnEvaluation(const EvaluationReport& report) override { numbers.push_back(report.loss); }
  void OnSaved(const SavedCheckpoint& checkpoint) override {
    saved.push_back(
        {checkpoint.id, checkpoint.result.directory, checkpoint.result.manifest_checksum});
  }

  std::vector<double> numbers;
  std::vector<StepReport> reports;
  std::vector<RestoreCandidate> saved;
  int64_t bytes = 0;  // device memory, peak
  absl::Status ended;
};

// Whole runs of a trainer on random text.
class TrainerStepsTest : public StepsTest {
 protected:
  void SetUp() override {
    StepsTest::SetUp();
    if (IsSkipped()) return;
    directory_ = absl::StrCat(::testing::TempDir(), "/muster-steps-", getpid());
    ASSERT_OK(files_->RemoveTree(directory_));
    ASSERT_OK(files_->MakeDirectory(directory_));
    auto writer = *IndexedDatasetWriter::Create(*files_, directory_ + "/text", TokenType::kU8);
    Rng rng(1);
    std::vector<int32_t> text = {1};
    while (text.size() < 20000) {
      const int32_t likely = (text.back() * 7 + 1) % kVocab;
      text.push_back(rng.Chance(0.8) ? likely : static_cast<int32_t>(rng.Below(kVocab)));
    }
    for (size_t begin = 0; begin < text.size();) {  // in documents of 20 to 99 tokens
      const size_t size = std::min<size_t>(20 + rng.Below(80), text.size() - begin);
      ASSERT_OK(writer->Append(absl::MakeSpan(text).subspan(begin, size)));
      ASSERT_OK(writer->EndDocument());
      begin += size;
    }
    ASSERT_OK(writer->Finish());
    dataset_ = *IndexedDataset::Open(directory_ + "/text");
  }
  void TearDown() override { EXPECT_OK(files_->RemoveTree(directory_)); }

  // Runs seven steps of several micro-batches, with evaluations between them.
  TrainerOptions Options() const {
    TrainerOptions options;
    options.steps = 7;
    options.global_batch = 6;
    options.micro_batch = 2;
    options.seed = 77;
    options.schedule = {kernels::LearningRateSchedule::Decay::kCosine, 2e-3, 2e-4, 3, 7};
    options.precision = GetParam() ? Precision::kBf16 : Precision::kFp32;
    options.evaluate_every = 3;
    options.evaluate_samples = 4;
    // Several buckets, so that some of them can be offloaded.
    options.bucket_bytes = int64_t{1} << 20;
    options.job = JobId("steps");
    options.epoch = Epoch(1);
    return options;
  }
  // The reports of a run.
  Recorder Train(const TrainerOptions& options, const ModelParallel& how = {},
                 const std::vector<RestoreCandidate>& restore = {}) {
    const int64_t sequence = model_.sizes.at("sequence_length");
    const auto training = *Sampler::Training({{dataset_.get(), 1}}, {sequence, kVocab, 9});
    const auto validation = *Sampler::Training({{dataset_.get(), 1}}, {sequence, kVocab, 10});
    const auto model = *MakeModel(model_, how);
    Recorder recorder;
    const auto world = MakeLocalCommunicators(1, absl::Seconds(60));
    const auto groups = *MeshGroups::Make(*Mesh::Make({}, 1), *world[0], 1);
    const int64_t before = device_->allocated_bytes();
    auto trainer =
        Trainer::Make(options, *model, *device_, *groups, training, &validation, *files_, recorder);
    EXPECT_OK(trainer);
    if (!trainer.ok()) return recorder;
    recorder.bytes = device_->allocated_bytes() - before;
    int64_t predicted = 0;
    for (const MemoryUse::Category& category : (*trainer)->PredictedMemory().device) {
      if (category.name != "libraries") predicted += category.bytes;
    }
    // Each stream of a GPU has scratch memory of its own.
    if (device_->kind() == kernels::DeviceKind::kCpu) {
      EXPECT_EQ(recorder.bytes, predicted);
    }
    EXPECT_OK((*trainer)->Restore(restore));
    if (initial_ != nullptr) {
      EXPECT_OK((*trainer)->Initialize(initial_));
    }
    recorder.ended = (*trainer)->Run().status();
    if (DomainOf(recorder.ended) != FailureDomain::kNumeric) {
      EXPECT_OK(recorder.ended);
    }
    return recorder;
  }

  std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::string directory_;
  std::unique_ptr<IndexedDataset> dataset_;
  ModelDescription model_ = Gpt2();
  // Null means that the weights are drawn from the seed.
  std::function<absl::Status(const std::string& name, const Box& box, float* out)> initial_;
};

TEST_P(TrainerStepsTest, Recording_ReportsTheSameNumbers) {
  TrainerOptions options = Options();
  for (const bool documents : {false, true}) {
    options.record = false;
    const std::vector<double> apart = Train(options, {.documents = documents}).numbers;
    EXPECT_EQ(apart.size(), 7u * 2 + 3);
    EXPECT_NE(apart, Train(options, {.documents = !documents}).numbers);
    options.record = true;
    EXPECT_EQ(apart, Train(options, {.documents = documents}).numbers);
  }
  const std::vector<double> dropping = Train(options, {.dropout = 0.1}).numbers;
  options.record = false;
  EXPECT_EQ(dropping, Train(options, {.dropout = 0.1}).numbers);
  EXPECT_NE(dropping, Train(options).numbers);
}

// The host's optimizer gives the same bits as the device's.
TEST_P(TrainerStepsTest, Offloading_ReportsTheSameNumbersInLessMemory) {
  // On a GPU, a GEMM that adds to zeros may be another kernel than one that overwrites.
  for (const int zero : {0, 3}) {
    TrainerOptions options = Options();
    options.zero = zero;
    options.host_threads = 2;
    const Recorder on_device = Train(options);
    int64_t last = on_device.bytes;
    for (const double share : {0.4, 1.0}) {
      SCOPED_TRACE(absl::StrCat("share ", share, ", stage ", zero, " of ZeRO"));
      options.offload_optimizer = share;
      const Recorder offloaded = Train(options);
      EXPECT_EQ(offloaded.numbers, on_device.numbers);
      EXPECT_LT(offloaded.bytes, last);
      last = offloaded.bytes;
    }
    options.offload_optimizer = 0.4;
    EXPECT_EQ(Train(options, {.offload_activations = true}).numbers, on_device.numbers);
  }
}

// With one micro-batch a step, gradients share memory with activations unless those are offloaded.
TEST_P(TrainerStepsTest, GradientsInTheRoomOfActivations_AreTheSameInLessMemory) {
  TrainerOptions options = Options();
  options.micro_batch = options.global_batch;
  options.record = false;
  const Recorder apart = Train(options, {.offload_activations = true});
  for (const bool record : {false, true}) {
    options.record = record;
    const Recorder shared = Train(options);
    EXPECT_EQ(shared.numbers, apart.numbers);
    EXPECT_LT(shared.bytes, apart.bytes);
  }
  options.offload_optimizer = 0.4;
  EXPECT_EQ(Train(options).numbers, apart.numbers);
  // ZeRO-3 keeps the reduced gradients that it owns elsewhere.
  options.offload_optimizer = 0;
  options.zero = 3;
  const Recorder apart3 = Train(options, {.offload_activations = true}), shared3 = Train(options);
  EXPECT_EQ(shared3.numbers, apart3.numbers);
  EXPECT_LT(shared3.bytes, apart3.bytes);
}

// Needs one micro-batch a step and training.any_order.
TEST_P(TrainerStepsTest, NormFromProducts_IsThatOfTheGradients) {
  TrainerOptions options = Options();
  options.micro_batch = options.global_batch;
  const Recorder apart = Train(options);
  for (const bool record : {false, true}) {
    options.record = record;
    const Recorder products = Train(options, {.deterministic = false});
    ASSERT_EQ(products.reports.size(), apart.reports.size());
    for (size_t i = 0; i < apart.reports.size(); ++i) {
      const double expected = apart.reports[i].gradient_norm;
      // Attention adds in any order as well, so the last bits differ.
      EXPECT_NEAR(products.reports[i].gradient_norm, expected, (i == 0 ? 1e-3 : 2e-2) * expected);
    }
  }
}

TEST_P(TrainerStepsTest, Checkpoint_GoesOnWithMastersInHalvesOrWholeOnTheHostOrTheDevice) {
  const std::vector<double> whole = Train(Options()).numbers;
  // The reports of the first continuation, by ZeRO stage.
  std::map<int, std::vector<double>> expected = {{0, {whole.end() - 8, whole.end()}}};
  for (const double first_share : {0.0, 1.0}) {
    TrainerOptions first = Options();
    first.offload_optimizer = first_share;
    first.steps = 3;
    first.checkpoint_root = directory_ + absl::StrCat("/saved-", first_share);
    first.checkpoint_every = 3;
    const Recorder begun = Train(first);
    ASSERT_EQ(begun.saved.size(), 1u);
    for (const int zero : {0, 3}) {
      for (const double share : {0.0, 0.4}) {
        SCOPED_TRACE(absl::StrCat(first_share, " then ", share, ", stage ", zero, " of ZeRO"));
        TrainerOptions second = Options();
        second.zero = zero;
        second.offload_optimizer = share;
        const std::vector<double> all = Train(second, {}, begun.saved).numbers;
        ASSERT_GE(all.size(), 8u);
        // Leaves out an evaluation that a restored run may repeat at its beginning.
        const std::vector<double> rest(all.end() - 8, all.end());
        EXPECT_EQ(rest, expected.try_emplace(zero, rest).first->second);
      }
    }
    TrainerOptions wide = Options();
    wide.precision = Precision::kFp32;
    const std::vector<double> numbers = Train(wide, {}, begun.saved).numbers;
    ASSERT_GE(numbers.size(), 1u);
    EXPECT_NEAR(numbers.back(), whole.back(), 0.02 * whole.back());
  }
}

// The device reads the residual of three compressed steps from the host.
TEST_P(TrainerStepsTest, ResidualOfWhatIsNotCompressedAnyMore_JoinsTheNextGradientAsOnTheHost) {
  TrainerOptions options = Options();
  options.precision = Precision::kFp32;
  options.optimizer.clip_norm = 0;
  options.compression.method = CompressionMethod::kTopK;
  options.compression.density = 0.02;
  TrainerOptions first = options;
  first.steps = 3;
  first.checkpoint_root = directory_ + "/compressed";
  first.checkpoint_every = 3;
  const Recorder begun = Train(first);
  ASSERT_EQ(begun.saved.size(), 1u);
  TrainerOptions whole = options, without = options;
  whole.steps = without.steps = 4;
  whole.compression.min_elements = int64_t{1} << 40;
  without.compression.method = CompressionMethod::kNone;
  const auto norm = [&](const TrainerOptions& next) {
    const Recorder run = Train(next, {}, begun.saved);
    EXPECT_EQ(run.reports.size(), 1u);
    return run.reports.empty() ? 0 : run.reports[0].gradient_norm;
  };
  const double joined = norm(whole), alone = norm(without);
  EXPECT_GT(joined, 1.2 * alone);
  device_ = kernels::MakeCpuDevice(2);
  EXPECT_NEAR(norm(whole), joined, 1e-3 * joined);
}

TEST_P(TrainerStepsTest, NumbersThatAreNotFinite_EndTheRunByStepSamplesAndDevice) {
  const auto expect_named = [&](const Recorder& run, int step) {
    EXPECT_EQ(DomainOf(run.ended), FailureDomain::kNumeric) << run.ended;
    EXPECT_EQ(run.numbers.size(), 2u * (step - 1));
    EXPECT_THAT(std::string(run.ended.message()),
                AllOf(HasSubstr(absl::StrCat("step ", step, " (samples ", 6 * (step - 1), " to ")),
                      HasSubstr(absl::StrCat("on ", device_->name(), ":")),
                      HasSubstr("the update was not applied"), HasSubstr("samples")));
    if (GetParam()) {
      EXPECT_THAT(device_->name(), HasSubstr("GPU-")) << "the UUID";
    }
  };
  TrainerOptions options = Options();
  options.evaluate_every = 0;
  // One weight of many is not finite.
  initial_ = [](const std::string& name, const Box& box, float* out) {
    std::fill_n(out, box.elements(), 0.01f);
    if (name == "blocks.1.mlp.up.weight") out[box.elements() / 2] = NAN;
    return absl::OkStatus();
  };
  for (const Precision precision : {options.precision, Precision::kFp32}) {
    options.precision = precision;
    expect_named(Train(options), 1);
    // The GEMMs see it where their epilogues add up the norm.
    TrainerOptions together = options;
    together.micro_batch = options.global_batch;
    expect_named(Train(together, {.deterministic = false}), 1);
  }
  initial_ = nullptr;
  // The second update makes weights overflow, which recorded steps report as well.
  options.optimizer.clip_norm = 0;
  options.schedule = {kernels::LearningRateSchedule::Decay::kConstant, 1e30, 0, 0, 0};
  expect_named(Train(options), 2);
  // The device remains usable.
  EXPECT_OK(Train(Options()).ended);
}

// The rules of loss scaling have tests on the host. Here whole steps, recorded ones too, apply
// them.
TEST_P(TrainerStepsTest, Fp16_SkipsWhatOverflowsAndLearnsAsInFp32) {
  if (!GetParam()) GTEST_SKIP() << "SKIPPED BY DESIGN: hosts train in fp32";
  TrainerOptions options = Options();
  options.evaluate_every = 0;
  options.steps = 40;
  // The learning rate counts the updates that were applied.
  options.schedule = {kernels::LearningRateSchedule::Decay::kConstant, 2e-3, 0, 100, 0};
  options.precision = Precision::kFp32;
  const Recorder fp32 = Train(options);
  options.precision = Precision::kFp16;
  options.loss_scaling = {.dynamic = true, .initial = 1e9f, .growth_interval = 8, .hysteresis = 2};
  std::vector<double> before;
  for (const bool record : {false, true}) {
    options.record = record;
    const Recorder fp16 = Train(options);
    ASSERT_EQ(fp16.reports.size(), 40u);
    EXPECT_TRUE(fp16.reports[0].skipped && fp16.reports[1].skipped) << "1e9 is too large";
    EXPECT_EQ(fp16.reports[1].loss_scale, fp16.reports[0].loss_scale) << "forgiven once";
    EXPECT_LT(fp16.reports[2].loss_scale, fp16.reports[1].loss_scale);
    int updates = 0;
    std::vector<double> losses;
    for (const StepReport& report : fp16.reports) {
      updates += report.skipped ? 0 : 1;
      EXPECT_TRUE(std::isfinite(report.loss)) << report.step;
      losses.push_back(report.loss);
      if (!report.skipped) {
        EXPECT_NEAR(report.learning_rate, 2e-5 * updates, 1e-9) << report.step;
      }
    }
    EXPECT_GT(updates, 20);
    EXPECT_LT(updates, 39);
    EXPECT_NEAR(fp16.reports.back().loss, fp32.reports.back().loss, 0.1 * fp32.reports.back().loss);
    if (record) {
      EXPECT_EQ(losses, before);
    }
    before = losses;
  }
}

// On a GPU in every precision, whatever is recomputed or on the host; on the host these have the
// same bits.
TEST_P(TrainerStepsTest, ScansInEveryPrecision_LearnAsOnTheHost) {
  for (const ModelDescription& model : {Mamba2(), Hybrid()}) {
    SCOPED_TRACE(model.family);
    model_ = model;
    if (model.family == "mamba2") model_.sizes["layers"] = 4;  // two of which are offloaded
    TrainerOptions options = Options();
    options.precision = Precision::kFp32;
    std::unique_ptr<kernels::Device> tested = std::exchange(device_, kernels::MakeCpuDevice(2));
    const std::vector<double> host = Train(options).numbers;
    device_ = std::move(tested);
    ASSERT_EQ(host.size(), 7u * 2 + 3);
    const auto expect_near = [&](const std::vector<double>& numbers, double tolerance) {
      ASSERT_EQ(numbers.size(), host.size());
      for (size_t i = 0; i < host.size(); ++i) {
        EXPECT_NEAR(numbers[i], host[i], tolerance * std::abs(host[i])) << i;
      }
    };
    expect_near(Train(options).numbers, GetParam() ? 2e-3 : 0);
    if (GetParam()) {
      tested = std::exchange(device_, *kernels::MakeCudaDevice(0, {.tf32 = true}));
      expect_near(Train(options).numbers, 0.02);
      device_ = std::move(tested);
    }
    for (const Precision precision : {Precision::kBf16, Precision::kFp16}) {
      if (GetParam()) {
        options.precision = precision;
        options.loss_scaling = {.dynamic = precision == Precision::kFp16, .initial = 1024};
      } else if (precision == Precision::kFp16) {
        break;  // hosts train in fp32
      }
      options.offload_optimizer = 0;
      const std::vector<double> kept = Train(options).numbers;
      expect_near(kept, GetParam() ? 0.05 : 0);
      for (const Recompute recompute : {Recompute::kSelective, Recompute::kFull}) {
        EXPECT_EQ(Train(options, {.recompute = recompute}).numbers, kept);
      }
      EXPECT_EQ(Train(options, {.offload_activations = true}).numbers, kept);
      options.offload_optimizer = 1;
      EXPECT_EQ(Train(options).numbers, kept);
    }
  }
}

TEST_P(TrainerStepsTest, SequencesOfAnyLength_LearnAsOnTheHost) {
  for (const ModelDescription& model : {Gpt2(), Llama(), Mamba2(), Hybrid()}) {
    for (const int64_t sequence : {1, 63, 127}) {
      SCOPED_TRACE(absl::StrCat(model.family, ", ", sequence, " tokens"));
      model_ = model;
      model_.sizes["sequence_length"] = sequence;
      TrainerOptions options = Options();
      options.precision = Precision::kFp32;
      std::unique_ptr<kernels::Device> tested = std::exchange(device_, kernels::MakeCpuDevice(2));
      const std::vector<double> host = Train(options).numbers;
      device_ = std::move(tested);
      options = Options();
      const std::vector<double> numbers = Train(options).numbers;
      ASSERT_EQ(numbers.size(), host.size());
      // Gradients of a token a sample are small sums.
      const double tolerance = !GetParam() ? 0 : sequence == 1 ? 0.15 : 0.05;
      for (size_t i = 0; i < host.size(); ++i) {
        EXPECT_NEAR(numbers[i], host[i], tolerance * std::abs(host[i])) << i;
      }
    }
  }
}

// Steps of the scan from 1e-9 to more than 20, within a model and from its first step on: exponents
// of -300 a position and states that hardly decay. A record (docs/benchmarks/mamba2.md) asks for
// more steps with MUSTER_EXTREME_STEPS.
TEST_P(TrainerStepsTest, Mamba2WithExtremeSteps_StaysFinite) {
  model_ = Mamba2();
  model_.sizes["sequence_length"] = 4 * kSequence;  // several chunks of the scan
  const char* const wanted = std::getenv("MUSTER_EXTREME_STEPS");
  TrainerOptions options = Options();
  options.steps = wanted != nullptr ? std::atoi(wanted) : GetParam() ? 100 : 6;
  options.evaluate_every = options.steps;
  options.schedule = {kernels::LearningRateSchedule::Decay::kCosine, 2e-3, 2e-4, 3, options.steps};
  const auto drawn = [](const std::string& name, double low, double high) {
    Rng rng(std::hash<std::string>()(name));
    return [rng, low, high]() mutable {
      return static_cast<float>(low +
                                (high - low) * static_cast<double>(rng.Below(1 << 20)) / (1 << 20));
    };
  };
  initial_ = [&](const std::string& name, const Box& box, float* out) {
    const int64_t count = box.elements();
    if (absl::EndsWith(name, ".dt_bias")) {
      auto draw = drawn(name, -20, 20);
      std::generate(out, out + count, draw);
    } else if (absl::EndsWith(name, ".a_log")) {
      auto draw = drawn(name, -3, 2.8);
      std::generate(out, out + count, draw);
    } else if (absl::EndsWith(name, ".d") || absl::EndsWith(name, "norm.weight")) {
      std::fill(out, out + count, 1.0f);
    } else if (absl::EndsWith(name, ".bias")) {
      std::fill(out, out + count, 0.0f);
    } else {
      auto draw = drawn(name, -0.1, 0.1);
      std::generate(out, out + count, draw);
    }
    return absl::OkStatus();
  };
  const Recorder run = Train(options);
  EXPECT_OK(run.ended);
  ASSERT_EQ(run.reports.size(), static_cast<size_t>(options.steps));
  for (const double number : run.numbers) ASSERT_TRUE(std::isfinite(number));
  EXPECT_LT(run.reports.back().loss, run.reports.front().loss);
  std::printf("%lld steps, loss %.3f to %.3f\n", static_cast<long long>(options.steps),
              run.reports.front().loss, run.reports.back().loss);
  if (!GetParam()) return;
  // What overflows in fp16 is skipped, and does not last.
  options.steps = 100;
  options.evaluate_every = options.steps;
  options.precision = Precision::kFp16;
  options.loss_scaling = {.dynamic = true, .initial = 65536, .growth_interval = 50};
  const Recorder fp16 = Train(options);
  EXPECT_OK(fp16.ended);
  ASSERT_EQ(fp16.reports.size(), 100u);
  int skipped = 0;
  for (const StepReport& report : fp16.reports) {
    ASSERT_TRUE(std::isfinite(report.loss)) << report.step;
    skipped += report.skipped ? 1 : 0;
  }
  EXPECT_LT(skipped, 30);
  EXPECT_LT(fp16.reports.back().loss, fp16.reports.front().loss);
}

TEST_P(TrainerStepsTest, Tf32_RoundsProductsAndLearnsAsFp32) {
  if (!GetParam()) GTEST_SKIP() << "SKIPPED BY DESIGN: hosts have no tf32";
  TrainerOptions options = Options();
  options.precision = Precision::kFp32;
  const std::vector<double> fp32 = Train(options).numbers;
  device_ = *kernels::MakeCudaDevice(0, {.tf32 = true});
  const std::vector<double> tf32 = Train(options).numbers;
  EXPECT_NE(tf32, fp32);
  ASSERT_EQ(tf32.size(), fp32.size());
  for (size_t i = 0; i < fp32.size(); ++i) EXPECT_NEAR(tf32[i], fp32[i], 0.01 * fp32[i]) << i;
}

TEST_P(StepsTest, Replay_OfWorkThatOutgrowsScratchOrWaits_RunsItAllTheSame) {
  const auto stream = *device_->MakeStream();
  const int64_t n = int64_t{1} << 16;
  const auto memory = *device_->Allocate(n * 1024 * sizeof(float));
  const auto out = *device_->Allocate(2 * sizeof(float));
  const Tensor all(memory->data(), DType::kF32, {n * 1024}), x = all.Rows(0, n);
  const Tensor sum(out->data(), DType::kF32, {1});
  const Tensor large_sum(static_cast<float*>(out->data()) + 1, DType::kF32, {1});
  std::vector<float> ones(n, 1.0f);
  kernels::Zero(*stream, all);
  kernels::Copy(*stream, Tensor(ones.data(), DType::kF32, {n}), x);
  const auto read = [&](const Tensor& from) {
    float value = 0;
    kernels::Copy(*stream, from, Tensor(&value, DType::kF32, {1}));
    EXPECT_OK(stream->Synchronize());
    return value;
  };
  kernels::Replay replay(*stream);
  for (int round = 0; round < 6; ++round) {
    // Every second call needs more scratch memory than any before.
    if (round % 2 == 1) kernels::Sum(*stream, all.Rows(0, n << (2 * round)), large_sum, false);
    kernels::Zero(*stream, sum);
    replay.Run({1}, [&] { kernels::Sum(*stream, x, sum, /*accumulate=*/true); });
    EXPECT_EQ(read(sum), static_cast<float>(n)) << "round " << round;
  }
  int calls = 0;
  for (int round = 0; round < 4; ++round) {
    kernels::Zero(*stream, sum);
    EXPECT_TRUE(replay.Run({2}, [&] {
      ++calls;
      kernels::Sum(*stream, x, sum, /*accumulate=*/true);
      stream->Synchronize().IgnoreError();  // cannot be recorded
    }));
    EXPECT_EQ(read(sum), static_cast<float>(n)) << "round " << round;
  }
  EXPECT_EQ(calls, GetParam() ? 5 : 4);  // on a GPU, one attempt to record
}

INSTANTIATE_TEST_SUITE_P(Devices, TrainerStepsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Cuda" : "Host"; });
INSTANTIATE_TEST_SUITE_P(Devices, StepsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Cuda" : "Host"; });

}  // namespace
}  // namespace muster::parallel
