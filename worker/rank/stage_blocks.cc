#include "worker/rank/stage_blocks.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/stages.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/job_plan.h"

namespace muster::worker {
namespace {

// The work of the stage that has most, in the unit of `costs`.
double SlowestStage(const std::vector<double>& costs, const std::vector<int>& boundaries) {
  double slowest = 0;
  for (size_t i = 0; i + 1 < boundaries.size(); ++i) {
    const auto at = [&](int boundary) { return costs.begin() + boundary; };
    slowest = std::max(slowest, std::accumulate(at(boundaries[i]), at(boundaries[i + 1]), 0.0));
  }
  return slowest;
}

}  // namespace

void SetPipelineBlocks(const std::vector<int>& boundaries, v1::ParallelSpec& split) {
  const int ranges = static_cast<int>(boundaries.size()) - 1;
  split.clear_pipeline_blocks();
  for (int i = 0; i < ranges; ++i) {
    const int tables = (i == 0 ? 1 : 0) + (i + 1 == ranges ? 1 : 0);
    split.add_pipeline_blocks(boundaries[i + 1] - boundaries[i] - tables);
  }
}

StageBlocks StageBlocksOf(const StageRange& range, const std::vector<int>& kinds) {
  const int between = static_cast<int>(kinds.size());
  const bool embedding = range.begin == 0, head = range.end == between + 2;
  return {range.stage, embedding, head,
          std::vector<int>(kinds.begin() + std::max(range.begin - 1, 0),
                           kinds.begin() + std::clamp(range.end - 1, 0, between))};
}

std::vector<int> KindsOf(const v1::ModelSpec& model) {
  return parallel::KindsOfBlocks(parallel::ConfigOf(Describe(model))).of_block;
}

BlockMover::BlockMover(const v1::JobSpec& spec)
    : spec_(spec),
      stages_(spec.engine().parallel().pipeline()),
      kinds_(KindsOf(spec.engine().model())) {}

std::optional<SpecChange> BlockMover::Within(int64_t bytes) {
  if (stages_ == 1 || spec_.engine().parallel().pipeline_chunks() != 1) return std::nullopt;
  const auto costs = parallel::BlockCosts(Describe(spec_.engine().model()));
  if (!costs.ok()) return std::nullopt;
  const auto moved = parallel::PartitionLayersWithin(
      *costs, stages_,
      [&](int stage, int begin, int end) { return StageBytes(stage, begin, end) <= bytes; });
  if (!moved.ok()) return std::nullopt;
  std::vector<int> before = {0};
  for (int stage = 0; stage < stages_; ++stage) {
    const auto part = PartOf(spec_, parallel::PerAxis(stage, 0, 0, 0));
    if (!part.ok()) return std::nullopt;
    before.push_back(part->parts[0].end);
  }
  SpecChange change = {spec_, {}, SlowestStage(*costs, *moved) / SlowestStage(*costs, before)};
  v1::ParallelSpec& split = *change.spec.mutable_engine()->mutable_parallel();
  SetPipelineBlocks(*moved, split);
  change.settings = {absl::StrCat("engine.parallel.pipeline_blocks=[",
                                  absl::StrJoin(split.pipeline_blocks(), ","), "]")};
  if (!spec::Validate(change.spec).ok()) return std::nullopt;
  return change;
}

// NeededBytes of the largest tensor rank of `stage`, were it to hold blocks [begin, end).
int64_t BlockMover::StageBytes(int stage, int begin, int end) {
  const auto [entry, added] =
      known_.try_emplace(StageBlocksOf({stage, begin, end}, kinds_), kTooMuch);
  if (added) {
    // Of equal shares the first one is no smaller than the others.
    const auto& shares = spec_.engine().parallel().tensor_shares();
    const auto tensor =
        static_cast<int>(std::max_element(shares.begin(), shares.end()) - shares.begin());
    const auto needed =
        RankBytes(spec_, parallel::PerAxis(stage, 0, 0, tensor), parallel::BlockRange{begin, end});
    if (needed.ok()) entry->second = *needed;
  }
  return entry->second;
}

}  // namespace muster::worker
