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
#include "parallel/comm/communicator.h"
#include "parallel/model/families/gpt2.h"
#include "parallel/pipeline/executor.h"
#include "tests/parallel/parameter_storage.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

constexpr Gpt2Config kConfig = {
    .layers = 6, .hidden = 12, .heads = 3, .vocab = 37, .sequence_length = 6};
constexpr BatchShape kBatch = {2, 6};

// Returns the blocks of a rank, cut evenly, so that some ranges hold one block and others two.
ModelParallel PartsOf(const PipelinePlan& plan, int rank) {
  const int blocks = static_cast<int>(kConfig.layers) + 2;
  ModelParallel parallel;
  parallel.split_backward = SplitsBackward(plan.shape);
  for (int chunk = 0; chunk < plan.shape.chunks; ++chunk) {
    const int part = plan.Part(rank, chunk);
    parallel.parts.push_back({part * blocks / plan.parts(), (part + 1) * blocks / plan.parts()});
  }
  return parallel;
}

// The results of one rank: gradients by name, summed over the micro-batches, and losses by
// micro-batch.
struct Found {
  std::map<std::string, std::vector<float>> gradients;
  std::map<std::string, std::vector<float>> duplicates;
  std::map<int, std::vector<float>> losses;
  std::map<int, std::vector<float>> forward_losses;
  absl::Status status;
};

// Keeps the gradients of every micro-batch apart.
class Client : public MicroBatchClient {
 public:
  Client(const ParameterRegistry& registry, std::map<int, std::vector<float>>& losses, int groups)
      : registry_(registry), losses_(losses), next_(groups, 0), open_(groups, false) {}

  absl::Status Load(int micro_batch, const ModelBatch& batch) override {
    Rng rng(testing::TestSeed() + static_cast<uint64_t>(micro_batch));
    for (int64_t i = 0; i < batch.shape.tokens(); ++i) {
      batch.tokens.as<int32_t>()[i] = static_cast<int32_t>(rng.Below(kConfig.vocab));
      batch.targets.as<int32_t>()[i] =
          i % 5 == 4 ? -1 : static_cast<int32_t>(rng.Below(kConfig.vocab));
    }
    return absl::OkStatus();
  }
  void OnLosses(int micro_batch, const kernels::Tensor& computed) override {
    const float* losses = computed.f32();
    losses_[micro_batch].assign(losses, losses + computed.dim(0));
  }
  const ParameterViews& BeginGradients(int group, int micro_batch) override {
    EXPECT_EQ(micro_batch, next_[group]);
    EXPECT_FALSE(open_[group]);
    open_[group] = true;
    return gradients_.try_emplace(micro_batch, registry_).first->second.views();
  }
  void EndGradients(int group, int micro_batch) override {
    EXPECT_EQ(micro_batch, next_[group]++);
    EXPECT_TRUE(open_[group]);
    open_[group] = false;
  }

  // Returns the sum over all micro-batches, added in their order.
  std::vector<float> Sum(ParameterId id) {
    std::vector<float> sum(registry_.at(id).storage_elements());
    for (auto& [micro_batch, gradients] : gradients_) {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += gradients[id][i];
    }
    return sum;
  }

 private:
  const ParameterRegistry& registry_;
  std::map<int, std::vector<float>>& losses_;
  std::vector<int> next_;
  std::vector<bool> open_;
  std::map<int, ParameterStorage> gradients_;
};

Found RunRank(const PipelinePlan& plan, Communicator& group, bool overlap) {
  Found found;
  const auto model = MakeGpt2(kConfig, PartsOf(plan, group.rank()));
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream();
  const ParameterRegistry& registry = model->parameters();
  ParameterStorage weights(registry);
  for (ParameterId id = 0; id < registry.size(); ++id) {
    Initialize(registry.at(id), 5, 0, registry.at(id).elements(), weights[id].data());
  }
  auto executor = PipelineExecutor::Make(plan, *model, group, *stream, {overlap});
  found.status = executor.status();
  if (!found.status.ok()) return found;
  kernels::Arena arena;
  (*executor)->TakeMemory(arena, kBatch);
  CHECK_OK(arena.Commit(*device));
  (*executor)->TakeMemory(arena, kBatch);
  // The second round finds the memory as the first has left it, which must not matter.
  const auto groups = static_cast<int>(GradientGroups(plan.shape, *model, group.rank()).size());
  for (int round = 0; round < 2; ++round) {
    Client client(registry, found.losses, groups);
    Pass pass = {*stream, weights.views()};
    pass.loss_scale = 0.125f;
    found.status.Update((*executor)->RunStep(pass, client));
    Client evaluation(registry, found.forward_losses, groups);
    pass.head = HeadMode::kLoss;
    found.status.Update((*executor)->RunForward(pass, 3, evaluation));
    found.status.Update(stream->Synchronize());
    for (ParameterId id = 0; id < registry.size(); ++id) {
      const Parameter& parameter = registry.at(id);
      std::vector<float> sum = client.Sum(id);
      sum.resize(parameter.elements());
      (parameter.duplicate ? found.duplicates : found.gradients)[parameter.name] = std::move(sum);
    }
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
    // Of a tied table, each of the two stages has its own contribution to the gradient.
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
            PipelineShape{PipelineSchedule::kZeroBubble, stages, micro_batches},
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
       {PipelineSchedule::kGPipe, PipelineSchedule::kOneForwardOneBackward,
        PipelineSchedule::kZeroBubble}) {
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
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("backward in two parts")));
}

// A stage keeps one more workspace for each micro-batch whose weight gradients it delays. Beside
// these it takes memory for gradients of norms alone.
TEST(PipelineExecutor, MemoryOfASplitBackward_IsThatOfItsWorkspaces) {
  auto groups = MakeLocalCommunicators(4, absl::Seconds(60));
  const auto device = kernels::MakeCpuDevice(1);
  const auto stream = *device->MakeStream();
  const auto activations = [&](PipelineSchedule schedule, int rank) {
    const PipelinePlan plan = MakePipelinePlan({schedule, 4, 7});
    const auto model = MakeGpt2(kConfig, PartsOf(plan, rank));
    const auto executor = *PipelineExecutor::Make(plan, *model, *groups[rank], *stream, {});
    kernels::Arena arena;
    executor->TakeMemory(arena, {2, 6});
    return arena.bytes_by_category().at("activations") / executor->buffers().workspaces[0];
  };
  for (int rank = 0; rank < 4; ++rank) {
    const int64_t whole = activations(PipelineSchedule::kOneForwardOneBackward, rank);
    const int64_t split = activations(PipelineSchedule::kZeroBubble, rank);
    // Two norms of a weight and a bias per block, each in an allocation of 256 bytes; at most two
    // blocks on a stage.
    EXPECT_GE(split, whole) << rank;
    EXPECT_LE(split, whole + 2 * 4 * 256) << rank;
  }
}

}  // namespace
}  // namespace muster::parallel
