// The workspaces of tensor ranks with uneven shares have the same offsets.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "kernels/arena.h"
#include "parallel/mesh/mesh.h"
#include "parallel/model/families/llama.h"
#include "parallel/train/memory.h"
#include "tests/support/status_matchers.h"

namespace muster::parallel {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

// Predicted bytes of the workspace, with the gradients that are in it.
int64_t PredictedBytes(const TrainerPlace& place) {
  const FlatLayout layout(place.model.parameters(), LayoutOptionsOf(place));
  int64_t bytes = -FlatBuffers::Sizes(layout, StorageOptionsOf(place)).gradients;
  for (const MemoryUse::Category& use : PredictMemory(place, kernels::DeviceKind::kCuda).device) {
    for (const char* name : {"gradients", "inputs", "activations", "logits", "stages", "scratch"}) {
      if (use.name == name) bytes += use.bytes;
    }
  }
  return bytes;
}

TEST(Workspace, EachAllocation_IsTheLargestOfTheRanksUnlessOneWouldTakeMuchMore) {
  EXPECT_THAT(MostOfEach({{4, 100, 8}, {8, 98, 8}}), ElementsAre(8, 100, 8));
  EXPECT_THAT(MostOfEach({{4, 100}}), ElementsAre(4, 100));
  EXPECT_THAT(MostOfEach({{4, 100, 8}, {8, 98}}), IsEmpty());
  EXPECT_THAT(MostOfEach({{4, 100}, {4, 30}}), IsEmpty());
  EXPECT_THAT(MostOfEach({}), IsEmpty());
}

struct Found {
  uint64_t layout = 0;
  int64_t bytes = 0;
  friend bool operator==(const Found&, const Found&) = default;
};

// The workspaces of two tensor ranks with shares of 5 to 4, as their Trainers allocate them.
std::vector<Found> WorkspacesOf(const TrainerOptions& options, Recompute recompute, bool align) {
  const LlamaConfig config = {2, 128, 8, 4, 1000, 515, 64};
  const Mesh mesh = *Mesh::Make({.degrees = PerAxis(1, 1, 1, 2)}, 2);
  const auto device = kernels::MakeCpuDevice(1);
  std::vector<std::unique_ptr<Model>> models;
  std::vector<TrainerPlace> places;
  std::vector<std::vector<int64_t>> allocations;
  for (int rank = 0; rank < 2; ++rank) {
    ModelParallel part;
    part.tensor_rank = rank;
    part.tensor_size = 2;
    part.tensor_weights = {5, 4};
    part.sequence_parallel = true;
    part.recompute = recompute;
    models.push_back(*MakeModel(Describe(config), part));
    places.push_back({.options = options,
                      .model = *models.back(),
                      .mesh = mesh,
                      .coordinate = PerAxis(0, 0, 0, rank),
                      .sequence_length = config.sequence_length});
    allocations.push_back(WorkspaceAllocations(places.back()));
  }
  const std::vector<int64_t> most = MostOfEach(allocations);
  EXPECT_FALSE(most.empty());
  std::vector<Found> found;
  for (TrainerPlace& place : places) {
    kernels::Arena arena;
    if (align) {
      arena.PadTo(most);
      place.workspace = &most;
    }
    PlanWorkspace(place, arena);
    EXPECT_OK(arena.Commit(*device));
    PlanWorkspace(place, arena);
    EXPECT_EQ(PredictedBytes(place), arena.peak_bytes());
    found.push_back({arena.layout(), arena.peak_bytes()});
  }
  return found;
}

TEST(Workspace, RanksWithUnevenShares_HaveTheSameOffsets) {
  TrainerOptions options;
  options.micro_batch = 2;
  for (const int64_t micro_batches : {1, 4}) {  // with one, gradients are in the workspace
    options.global_batch = 2 * micro_batches;
    for (const Recompute recompute : {Recompute::kNone, Recompute::kSelective, Recompute::kFull}) {
      const auto apart = WorkspacesOf(options, recompute, false);
      const auto alike = WorkspacesOf(options, recompute, true);
      EXPECT_NE(apart[0].layout, apart[1].layout);
      EXPECT_EQ(alike[0], alike[1]);
      EXPECT_GE(alike[0].bytes, std::max(apart[0].bytes, apart[1].bytes));
    }
  }
}

}  // namespace
}  // namespace muster::parallel
