// A pipeline of any schedule computes the losses and gradients of one rank, bit for bit.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/rng.h"
#include "kernels/ops.h"
#include "parallel/comm/communicator.h"
#include "parallel/model/gpt2.h"
#include "parallel/pipeline/executor.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

constexpr Gpt2Config kConfig = {
    .layers = 6, .hidden = 12, .heads = 3, .vocab = 37, .sequence_length = 6};
constexpr BatchShape kBatch = {2, 6};

// The blocks of rank `rank`: cut evenly, so that some ranges hold one block and others two.
ModelParallel PartsOf(const PipelinePlan& plan, int rank) {
  const int blocks = static_cast<int>(kConfig.layers) + 2;
  ModelParallel parallel;
  for (int chunk = 0; chunk < plan.shape.chunks; ++chunk) {
    const int part = plan.Part(rank, chunk);
    parallel.parts.push_back({part * blocks / plan.parts(), (part + 1) * blocks / plan.parts()});
  }
  return parallel;
}

// What one rank has found: gradients by name, summed over the micro-batches, and losses.
struct Found {
  std::map<std::string, std::vector<float>> gradients;
  std::map<std::string, std::vector<float>> duplicates;
  std::map<int, std::vector<float>> losses;
  std::map<int, std::vector<float>> forward_losses;
  absl::Status status;
};

// Adds the gradients of every micro-batch to one buffer: the order of the micro-batches decides the
// bits.
class Client : public MicroBatchClient {
 public:
  Client(const ParameterViews& gradients, std::map<int, std::vector<float>>& losses, int chunks)
      : gradients_(gradients), losses_(losses), next_(chunks, 0) {}

  absl::Status Load(int micro_batch, Flow& flow) override {
    Rng rng(testing::TestSeed() + static_cast<uint64_t>(micro_batch));
    for (int64_t i = 0; i < flow.shape.tokens(); ++i) {
      flow.tokens.as<int32_t>()[i] = static_cast<int32_t>(rng.Below(kConfig.vocab));
      flow.targets.as<int32_t>()[i] =
          i % 5 == 4 ? -1 : static_cast<int32_t>(rng.Below(kConfig.vocab));
    }
    return absl::OkStatus();
  }
  void OnLosses(int micro_batch, const Flow& flow) override {
    const float* losses = flow.losses.f32();
    losses_[micro_batch].assign(losses, losses + flow.shape.tokens());
  }
  const ParameterViews& BeginGradients(int chunk, int micro_batch) override {
    EXPECT_EQ(micro_batch, next_[chunk]);
    return gradients_;
  }
  void EndGradients(int chunk, int micro_batch) override { EXPECT_EQ(micro_batch, next_[chunk]++); }

 private:
  const ParameterViews& gradients_;
  std::map<int, std::vector<float>>& losses_;
  std::vector<int> next_;
};

// One tensor per parameter of a model, in memory of its own.
class Storage {
 public:
  explicit Storage(const ParameterRegistry& registry) : values_(registry.size()) {
    std::vector<kernels::Tensor> views;
    for (ParameterId id = 0; id < registry.size(); ++id) {
      const Parameter& parameter = registry.at(id);
      values_[id].resize(parameter.storage_elements());
      views.push_back(
          parameter.box.extent.size() == 1
              ? kernels::Tensor(values_[id].data(), kernels::DType::kF32, {parameter.storage_rows})
              : kernels::Tensor(values_[id].data(), kernels::DType::kF32,
                                {parameter.storage_rows, parameter.box.extent[1]}));
    }
    views_ = ParameterViews(std::move(views));
  }
  std::vector<float>& operator[](ParameterId id) { return values_[id]; }
  const ParameterViews& views() const { return views_; }
  void Zero() {
    for (std::vector<float>& values : values_) std::fill(values.begin(), values.end(), 0.0f);
  }

 private:
  std::vector<std::vector<float>> values_;
  ParameterViews views_;
};

Found RunRank(const PipelinePlan& plan, Communicator& group, bool overlap) {
  Found found;
  const auto model = MakeGpt2(kConfig, PartsOf(plan, group.rank()));
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream();
  const ParameterRegistry& registry = model->parameters();
  Storage weights(registry), gradients(registry);
  for (ParameterId id = 0; id < registry.size(); ++id) {
    Initialize(registry.at(id), 5, weights[id].data());
  }
  auto executor = PipelineExecutor::Make(plan, *model, group, *stream, {overlap});
  found.status = executor.status();
  if (!found.status.ok()) return found;
  kernels::Arena arena;
  (*executor)->TakeMemory(arena, kBatch);
  CHECK_OK(arena.Commit(*device));
  (*executor)->TakeMemory(arena, kBatch);
  // Stale memory must not matter.
  for (int round = 0; round < 2; ++round) {
    gradients.Zero();
    Client client(gradients.views(), found.losses, plan.shape.chunks);
    Pass pass = {*stream, weights.views()};
    pass.loss_scale = 0.125f;
    found.status.Update((*executor)->RunStep(pass, client));
    Client evaluation(gradients.views(), found.forward_losses, plan.shape.chunks);
    pass.head = HeadMode::kLoss;
    found.status.Update((*executor)->RunForward(pass, 3, evaluation));
    found.status.Update(stream->Synchronize());
  }
  for (ParameterId id = 0; id < registry.size(); ++id) {
    const Parameter& parameter = registry.at(id);
    const float* data = gradients[id].data();
    (parameter.duplicate ? found.duplicates : found.gradients)[parameter.name] = {
        data, data + parameter.elements()};
  }
  return found;
}

Found RunPipeline(const PipelineShape& shape, bool overlap = true) {
  const PipelinePlan plan = MakePipelinePlan(shape);
  auto groups = MakeLocalCommunicators(shape.stages, absl::Seconds(60));
  std::vector<Found> ranks(shape.stages);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < shape.stages; ++rank) {
    threads.emplace_back([&, rank] { ranks[rank] = RunRank(plan, *groups[rank], overlap); });
  }
  for (std::thread& thread : threads) thread.join();
  Found whole = ranks[0];
  for (int rank = 1; rank < shape.stages; ++rank) {
    whole.status.Update(ranks[rank].status);
    whole.gradients.insert(ranks[rank].gradients.begin(), ranks[rank].gradients.end());
    whole.duplicates.insert(ranks[rank].duplicates.begin(), ranks[rank].duplicates.end());
    if (!ranks[rank].losses.empty()) whole.losses = ranks[rank].losses;
    if (!ranks[rank].forward_losses.empty()) whole.forward_losses = ranks[rank].forward_losses;
  }
  return whole;
}

std::string Describe(const PipelineShape& shape) {
  return absl::StrCat(Name(shape.schedule), ", ", shape.stages, " stages, ", shape.micro_batches,
                      " micro-batches, ", shape.chunks, " chunks");
}

void ExpectSameBits(const Found& expected, const Found& actual) {
  ASSERT_OK(actual.status);
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.forward_losses, expected.forward_losses);
  ASSERT_EQ(actual.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    const auto duplicate = actual.duplicates.find(name);
    if (duplicate == actual.duplicates.end()) {
      EXPECT_EQ(actual.gradients.at(name), gradient) << name;
      continue;
    }
    // The tied table: one part of the gradient on each stage.
    for (size_t i = 0; i < gradient.size(); ++i) {
      ASSERT_NEAR(actual.gradients.at(name)[i] + duplicate->second[i], gradient[i], 1e-7);
    }
  }
}

TEST(PipelineExecutor, EverySchedule_GivesTheBitsOfOneRank) {
  for (const int micro_batches : {1, 2, 5}) {
    const Found alone = RunPipeline({PipelineSchedule::kOneForwardOneBackward, 1, micro_batches});
    ASSERT_OK(alone.status);
    ASSERT_EQ(alone.losses.size(), static_cast<size_t>(micro_batches));
    ASSERT_EQ(alone.forward_losses.size(), 3u);
    for (const int stages : {1, 2, 3, 4, 8}) {
      for (const PipelineShape& shape :
           {PipelineShape{PipelineSchedule::kGPipe, stages, micro_batches},
            PipelineShape{PipelineSchedule::kOneForwardOneBackward, stages, micro_batches},
            PipelineShape{PipelineSchedule::kInterleaved, stages, micro_batches, 2}}) {
        if (stages * shape.chunks > kConfig.layers + 2) continue;
        SCOPED_TRACE(Describe(shape));
        ExpectSameBits(alone, RunPipeline(shape));
      }
    }
  }
}

TEST(PipelineExecutor, WithoutOverlap_GivesTheSameBits) {
  const PipelineShape shape = {PipelineSchedule::kInterleaved, 2, 4, 2};
  ExpectSameBits(RunPipeline({PipelineSchedule::kGPipe, 1, 4}),
                 RunPipeline(shape, /*overlap=*/false));
}

TEST(PipelineExecutor, MemoryInFlight_IsThatOfTheSchedule) {
  auto groups = MakeLocalCommunicators(4, absl::Seconds(60));
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream();
  for (const PipelineSchedule schedule :
       {PipelineSchedule::kGPipe, PipelineSchedule::kOneForwardOneBackward}) {
    const PipelinePlan plan = MakePipelinePlan({schedule, 4, 7});
    ASSERT_OK_AND_ASSIGN(const PipelineSimulation simulation, Simulate(plan));
    for (int rank = 0; rank < 4; ++rank) {
      const auto model = MakeGpt2(kConfig, PartsOf(plan, rank));
      ASSERT_OK_AND_ASSIGN(const auto executor,
                           PipelineExecutor::Make(plan, *model, *groups[rank], *stream, {}));
      EXPECT_EQ(executor->buffers().workspaces,
                std::vector<int>{simulation.ranks[rank].activations});
      EXPECT_EQ(executor->buffers().gradients, simulation.ranks[rank].gradients);
      EXPECT_LE(executor->buffers().inputs, simulation.ranks[rank].inputs);
    }
  }
}

TEST(PipelineExecutor, PlanThatDoesNotFit_IsRefused) {
  auto groups = MakeLocalCommunicators(2, absl::Seconds(60));
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream();
  const auto model = MakeGpt2(kConfig);
  const auto make = [&](const PipelineShape& shape) {
    return PipelineExecutor::Make(MakePipelinePlan(shape), *model, *groups[0], *stream, {})
        .status();
  };
  EXPECT_THAT(
      make({PipelineSchedule::kGPipe, 3, 2}),
      StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("3 stages over a group of 2")));
  EXPECT_THAT(make({PipelineSchedule::kInterleaved, 2, 2, 2}),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("2 chunks")));
  EXPECT_THAT(make({PipelineSchedule::kZeroBubble, 2, 2}),
              StatusIs(absl::StatusCode::kUnimplemented, HasSubstr("zero_bubble")));
}

}  // namespace
}  // namespace muster::parallel
