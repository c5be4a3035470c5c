// Training steps on one device give the same bits every time: op by op or recorded, in this run or
// in another. The same on the host, which never skips (and never records).
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "kernels/arena.h"
#include "kernels/device.h"
#include "kernels/ops.h"
#include "kernels/replay.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/train/trainer.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr int64_t kVocab = 61;
constexpr int64_t kSequence = 128;

// Heads of 64 columns, for which cuDNN has its graphs.
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

// Whether on a GPU.
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

  // Master weights and moments after `steps`. `documents`: attention stays within those of a few
  // tokens, other ones in every step.
  std::vector<float> Train(const ModelDescription& description, Recompute recompute, int steps,
                           bool record, bool documents = false);

  std::unique_ptr<kernels::Device> device_;
};

std::vector<float> StepsTest::Train(const ModelDescription& description, Recompute recompute,
                                    int steps, bool record, bool documents) {
  const auto model = *MakeModel(description, {.recompute = recompute, .documents = documents});
  const FlatLayout layout(model->parameters(), int64_t{1} << 20, 1);
  const auto stream = *device_->MakeStream();
  const auto flat = *FlatBuffers::Make(*device_, *stream, model->parameters(), layout,
                                       {.seed = 5, .compute = compute()});
  const BatchShape shape = {.batch = 3, .sequence = kSequence, .activation = compute()};
  kernels::Arena arena;
  model->TakeWorkspace(arena, shape);
  EXPECT_OK(arena.Commit(*device_));
  Workspace workspace = model->TakeWorkspace(arena, shape);
  const auto sums = *device_->Allocate(2 * sizeof(float));
  const auto scalars = *device_->Allocate(sizeof(kernels::StepScalars));
  const auto sum = [&](int i) {
    return Tensor(static_cast<float*>(sums->data()) + i, DType::kF32, {1});
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
                       .overwrite_gradients = true};
    model->Forward(pass, workspace);
    model->Backward(pass, workspace);
    kernels::SumSquares(*stream, flat->all_gradients(0), sum(0), false);
    kernels::ClipCoefficient(*stream, sum(0), 1.0f, sum(1), step_scalars);
    for (int i = 0; i < static_cast<int>(layout.buckets().size()); ++i) {
      kernels::AdamWArgs update = flat->update(i);
      update.weight_decay = 0.1f;
      update.scalars = step_scalars;
      kernels::AdamW(*stream, update);
    }
  };
  kernels::Replay replay(*stream);
  std::mt19937 random(11), borders(12);
  for (int step = 0; step < steps; ++step) {
    std::vector<int32_t> tokens(shape.tokens());
    for (const Tensor& to : {workspace.flow.tokens, workspace.flow.targets}) {
      for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kVocab);
      upload(tokens.data(), to);
    }
    if (documents) {
      std::vector<int32_t> begins(shape.tokens());
      for (int32_t i = 0; i < shape.tokens(); ++i) {
        const int32_t position = i % kSequence;
        begins[i] = position == 0 || borders() % 20 == 0 ? position : begins[i - 1];
      }
      upload(begins.data(), workspace.flow.documents);
    }
    if (record) {
      replay.Run({}, enqueue);
    } else {
      enqueue();
    }
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
  for (const ModelDescription& description : {Gpt2(), Llama()}) {
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

TEST_P(StepsTest, DocumentsThatChangeFromStepToStep_AreReadByRecordedStepsToo) {
  for (const ModelDescription& description : {Gpt2(), Llama()}) {
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

class Recorder : public TrainerHooks {
 public:
  void OnStep(const StepReport& report) override {
    numbers.push_back(report.loss);
    numbers.push_back(report.gradient_norm);
  }
  void OnEvaluation(const EvaluationReport& report) override { numbers.push_back(report.loss); }

  std::vector<double> numbers;
};

// Several micro-batches a step, evaluations between steps.
TEST_P(StepsTest, TrainerThatRecords_ReportsTheNumbersOfOneThatDoesNot) {
  const auto files = PosixFileSystem();
  const std::string directory = absl::StrCat(::testing::TempDir(), "/muster-steps-", getpid());
  ASSERT_OK(files->RemoveTree(directory));
  ASSERT_OK(files->MakeDirectory(directory));
  {
    auto writer = *IndexedDatasetWriter::Create(*files, directory + "/text", TokenType::kU8);
    Rng rng(1);
    std::vector<int32_t> text = {1};
    while (text.size() < 20000) {
      const int32_t likely = (text.back() * 7 + 1) % kVocab;
      text.push_back(rng.Chance(0.8) ? likely : static_cast<int32_t>(rng.Below(kVocab)));
    }
    for (size_t begin = 0; begin < text.size();) {  // documents of 20 to 99 tokens
      const size_t size = std::min<size_t>(20 + rng.Below(80), text.size() - begin);
      ASSERT_OK(writer->Append(absl::MakeSpan(text).subspan(begin, size)));
      ASSERT_OK(writer->EndDocument());
      begin += size;
    }
    ASSERT_OK(writer->Finish());
  }
  const auto dataset = *IndexedDataset::Open(directory + "/text");
  const auto training = *Sampler::Training({{dataset.get(), 1}}, {kSequence, kVocab, 9});
  const auto validation = *Sampler::Training({{dataset.get(), 1}}, {kSequence, kVocab, 10});
  const auto train = [&](bool record, bool documents) {
    const auto model = *MakeModel(Gpt2(), {.documents = documents});
    TrainerOptions options;
    options.steps = 7;
    options.global_batch = 6;
    options.micro_batch = 2;
    options.seed = 77;
    options.schedule = {kernels::LearningRateSchedule::Decay::kCosine, 2e-3, 2e-4, 3, 7};
    options.precision = GetParam() ? Precision::kBf16 : Precision::kFp32;
    options.evaluate_every = 3;
    options.evaluate_samples = 4;
    options.record = record;
    options.job = JobId("steps");
    options.epoch = Epoch(1);
    Recorder recorder;
    const auto world = MakeLocalCommunicators(1, absl::Seconds(60));
    const auto groups = *MeshGroups::Make(*Mesh::Make({}, 1), *world[0], 1);
    auto trainer =
        Trainer::Make(options, *model, *device_, *groups, training, &validation, *files, recorder);
    EXPECT_OK(trainer);
    EXPECT_OK((*trainer)->Run());
    return recorder.numbers;
  };
  for (const bool documents : {false, true}) {
    const std::vector<double> apart = train(/*record=*/false, documents);
    EXPECT_EQ(apart.size(), 7u * 2 + 3);
    EXPECT_EQ(apart, train(/*record=*/true, documents));
    EXPECT_NE(apart, train(/*record=*/false, !documents));
  }
  EXPECT_OK(files->RemoveTree(directory));
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
    // Larger and larger scratch memory, half of the time.
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
      stream->Synchronize().IgnoreError();  // no recording can hold this
    }));
    EXPECT_EQ(read(sum), static_cast<float>(n)) << "round " << round;
  }
  EXPECT_EQ(calls, GetParam() ? 5 : 4);  // one was to be recorded
}

INSTANTIATE_TEST_SUITE_P(Devices, StepsTest, ::testing::Bool(),
                         [](const auto& info) { return info.param ? "Cuda" : "Host"; });

}  // namespace
}  // namespace muster::parallel
