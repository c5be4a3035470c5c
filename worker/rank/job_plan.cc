#include "worker/rank/job_plan.h"

#include <algorithm>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/model/tensor_parallel.h"
#include "parallel/pipeline/stages.h"
#include "worker/rank/engine_spec.h"

namespace muster::worker {
namespace {

using kernels::DeviceKind;
using parallel::Axis;

// What a tensor rank's memory depends on: how much it holds of everything that is shared out, of
// how many groups, and in which parts.
using Shares = std::vector<std::pair<int64_t, int64_t>>;

Shares SharesOf(const parallel::ModelDescription& model, const parallel::ModelParallel& part) {
  Shares shares;
  for (const parallel::SplitShare& share : parallel::TensorShard::Of(model, part).shares) {
    shares.emplace_back(share.span.size(), share.groups.size());
    for (const parallel::GroupPart& part : share.parts) {
      shares.emplace_back(part.units.size(), part.groups.size());
    }
  }
  return shares;
}

RankPlan::Whole WholeOf(const parallel::TrainerPlace& place) {
  RankPlan::Whole whole;
  if (place.options.zero < 2) return whole;
  const parallel::ParameterRegistry& parameters = place.model.parameters();
  const parallel::FlatLayout layout(parameters, parallel::LayoutOptionsOf(place));
  for (parallel::ParameterId id = 0; id < parameters.size(); ++id) {
    const parallel::Parameter& parameter = parameters.at(id);
    if (layout.buckets()[layout.bucket_of(id)].block >= 0) continue;
    if (parameter.sharing == parallel::TensorSharing::kShared) {
      whole.keys += parameter.elements();
    } else if (parameter.resident) {
      whole.tables += parameter.elements();
    } else {
      whole.small += parameter.elements();
    }
  }
  return whole;
}

parallel::TrainerPlace PlaceOf(const v1::JobSpec& spec, const SplitRun& split,
                               const parallel::TrainerOptions& options,
                               const parallel::Model& model, const parallel::PerAxis& coordinate) {
  return {.options = options,
          .model = model,
          .mesh = split.mesh,
          .coordinate = coordinate,
          .zero_shards = split.zero_shards,
          .sequence_length = spec.engine().model().sequence_length()};
}

struct Alignment {
  std::vector<int64_t>
      allocations;          // TrainerPlace::workspace; empty: every rank takes what it needs
  bool too_uneven = false;  // RankPlan::too_uneven
};

// Aligns the workspaces of the tensor group that `place` is in. `blocks`, where given, replaces the
// blocks of its stage.
absl::StatusOr<Alignment> Align(const v1::JobSpec& spec, const SplitRun& split,
                                const parallel::TrainerPlace& place,
                                std::optional<parallel::BlockRange> blocks, DeviceKind device) {
  if (!parallel::AlignsWorkspaces(place, device)) return Alignment();
  parallel::PerAxis coordinate = place.coordinate;
  const parallel::ModelDescription description = Describe(spec.engine().model());
  std::map<Shares, parallel::ModelParallel> kinds;
  for (int tensor = 0; tensor < place.mesh.degree(Axis::kTensor); ++tensor) {
    coordinate[Axis::kTensor] = tensor;
    ASSIGN_OR_RETURN(parallel::ModelParallel part, PartOf(spec, coordinate));
    if (blocks.has_value()) part.parts = {*blocks};
    kinds.emplace(SharesOf(description, part), std::move(part));
  }
  if (kinds.size() == 1) return Alignment();
  std::vector<std::vector<int64_t>> ranks;
  for (const auto& [shares, part] : kinds) {
    ASSIGN_OR_RETURN(const auto model, parallel::MakeModel(description, part));
    ranks.push_back(
        parallel::WorkspaceAllocations(PlaceOf(spec, split, place.options, *model, coordinate)));
  }
  Alignment alignment = {.allocations = parallel::MostOfEach(ranks)};
  alignment.too_uneven = alignment.allocations.empty();
  return alignment;
}

absl::StatusOr<RankPlan> PlanRank(const v1::JobSpec& spec, const SplitRun& split,
                                  const parallel::TrainerOptions& options,
                                  const parallel::PerAxis& coordinate, DeviceKind device) {
  ASSIGN_OR_RETURN(const parallel::ModelParallel part, PartOf(spec, coordinate));
  ASSIGN_OR_RETURN(const auto model, BuildModel(spec, coordinate));
  const int head = static_cast<int>(spec.engine().model().layers()) + 1;
  RankPlan rank;
  rank.pipeline = coordinate[Axis::kPipeline];
  rank.tensor = coordinate[Axis::kTensor];
  rank.first_rank = split.mesh.RankOf(coordinate);
  std::vector<parallel::BlockRange> parts = part.parts;
  if (parts.empty()) parts.push_back({0, head + 1});
  for (const parallel::BlockRange& range : parts) {
    const bool first = range.begin == 0, last = range.end == head + 1;
    rank.embedding = rank.embedding || first;
    rank.head = rank.head || last;
    rank.blocks += range.end - range.begin - (first ? 1 : 0) - (last ? 1 : 0);
  }
  rank.parameters = model->parameters().elements();
  parallel::TrainerPlace place = PlaceOf(spec, split, options, *model, coordinate);
  ASSIGN_OR_RETURN(const Alignment aligned, Align(spec, split, place, std::nullopt, device));
  if (!aligned.allocations.empty()) place.workspace = &aligned.allocations;
  rank.too_uneven = aligned.too_uneven;
  rank.memory = parallel::PredictMemory(place, device);
  rank.sent = parallel::PredictVolume(place, part, device);
  rank.whole = WholeOf(place);
  return rank;
}

// The idle share of the ranks' time (JobPlan::bubble), every block at its estimated cost.
absl::StatusOr<double> BubbleOf(const v1::JobSpec& spec, const SplitRun& split,
                                const parallel::PipelineShape& shape) {
  if (shape.stages == 1) return 0.0;
  ASSIGN_OR_RETURN(const std::vector<double> blocks,
                   parallel::BlockCosts(Describe(spec.engine().model())));
  const parallel::PipelinePlan plan = parallel::MakePipelinePlan(shape);
  parallel::PipelineCosts costs;
  costs.parts.resize(plan.parts());
  for (int stage = 0; stage < shape.stages; ++stage) {
    ASSIGN_OR_RETURN(const parallel::ModelParallel part,
                     PartOf(spec, parallel::PerAxis(stage, 0, 0, 0)));
    for (int chunk = 0; chunk < shape.chunks; ++chunk) {
      const parallel::BlockRange range = part.parts[chunk];
      for (int i = range.begin; i < range.end; ++i) {
        costs.parts[plan.Part(stage, chunk)] += blocks[i];
      }
    }
  }
  ASSIGN_OR_RETURN(const parallel::PipelineSimulation simulation, Simulate(plan, costs));
  const double idle = simulation.bubble();
  return idle / (1 + idle);
}

}  // namespace

int64_t NeededBytes(const parallel::MemoryUse& use, DeviceKind device) {
  return use.device_bytes() + (device == DeviceKind::kCpu ? use.host_bytes() : 0);
}

absl::StatusOr<int64_t> RankBytes(const v1::JobSpec& spec, const parallel::PerAxis& coordinate,
                                  std::optional<parallel::BlockRange> blocks) {
  ASSIGN_OR_RETURN(const SplitRun split, SplitOf(spec));
  ASSIGN_OR_RETURN(parallel::ModelParallel part, PartOf(spec, coordinate));
  if (blocks.has_value()) part.parts = {*blocks};
  ASSIGN_OR_RETURN(const auto model, parallel::MakeModel(Describe(spec.engine().model()), part));
  const parallel::TrainerOptions options = OptionsOf(spec);
  const DeviceKind device = DeviceKindOf(spec);
  parallel::TrainerPlace place = PlaceOf(spec, split, options, *model, coordinate);
  ASSIGN_OR_RETURN(const Alignment aligned, Align(spec, split, place, blocks, device));
  if (!aligned.allocations.empty()) place.workspace = &aligned.allocations;
  return NeededBytes(parallel::PredictMemory(place, device), device);
}

const RankPlan& JobPlan::largest() const {
  return *std::max_element(ranks.begin(), ranks.end(), [&](const RankPlan& a, const RankPlan& b) {
    return NeededBytes(a.memory, device) < NeededBytes(b.memory, device);
  });
}

int64_t JobPlan::needed_bytes() const { return NeededBytes(largest().memory, device); }

int64_t JobPlan::host_bytes() const {
  int64_t most = 0;
  for (const RankPlan& rank : ranks) most = std::max(most, rank.memory.host_bytes());
  return most;
}

double JobPlan::imbalance() const {
  double bytes = 0, count = 0;
  for (const RankPlan& rank : ranks) {
    bytes += static_cast<double>(NeededBytes(rank.memory, device)) * rank.ranks;
    count += rank.ranks;
  }
  return bytes == 0 ? 0 : static_cast<double>(needed_bytes()) / (bytes / count) - 1;
}

absl::StatusOr<JobPlan> PlanJob(const v1::JobSpec& spec) {
  ASSIGN_OR_RETURN(const SplitRun split, SplitOf(spec));
  const parallel::TrainerOptions options = OptionsOf(spec);
  const parallel::ModelDescription description = Describe(spec.engine().model());
  JobPlan plan;
  plan.device = DeviceKindOf(spec);
  plan.degrees = split.mesh.degrees();
  const int replicas = plan.degrees[Axis::kData] * plan.degrees[Axis::kContext];
  for (int stage = 0; stage < plan.degrees[Axis::kPipeline]; ++stage) {
    std::map<Shares, size_t> alike;  // index in plan.ranks
    for (int tensor = 0; tensor < plan.degrees[Axis::kTensor]; ++tensor) {
      const parallel::PerAxis coordinate(stage, 0, 0, tensor);
      ASSIGN_OR_RETURN(const parallel::ModelParallel part, PartOf(spec, coordinate));
      const auto [entry, added] = alike.emplace(SharesOf(description, part), plan.ranks.size());
      if (added) {
        ASSIGN_OR_RETURN(RankPlan rank, PlanRank(spec, split, options, coordinate, plan.device));
        plan.ranks.push_back(std::move(rank));
      }
      plan.ranks[entry->second].ranks += replicas;
    }
  }
  ASSIGN_OR_RETURN(const auto whole, parallel::MakeModel(description));
  plan.parameters = whole->parameters().elements();
  plan.flops_per_token = whole->training_flops_per_token();
  plan.tokens_per_step = options.global_batch * spec.engine().model().sequence_length();
  plan.micro_batches = options.global_batch / options.micro_batch / plan.degrees[Axis::kData];
  parallel::PipelineShape shape;
  shape.schedule = options.pipeline_schedule;
  shape.stages = plan.degrees[Axis::kPipeline];
  shape.micro_batches = static_cast<int>(plan.micro_batches);
  shape.chunks = spec.engine().parallel().pipeline_chunks();
  ASSIGN_OR_RETURN(plan.bubble, BubbleOf(spec, split, shape));
  return plan;
}

std::string BytesText(int64_t bytes) {
  const auto amount = static_cast<double>(bytes);
  constexpr double kMiB = 1024 * 1024;
  if (amount >= 1024 * kMiB) return absl::StrFormat("%.2f GiB", amount / (1024 * kMiB));
  return absl::StrFormat("%.1f MiB", amount / kMiB);
}

}  // namespace muster::worker
