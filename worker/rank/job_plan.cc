#include "worker/rank/job_plan.h"

#include <algorithm>
#include <array>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/model/tensor_parallel.h"
#include "parallel/pipeline/partition.h"
#include "parallel/pipeline/stages.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_setup.h"

namespace muster::worker {
namespace {

using kernels::DeviceKind;
using parallel::Axis;

// Predictions of one search: it takes a few seconds at most.
constexpr int kTriesMax = 2000;
// Estimates of what offloading the optimizer costs: AdamW on a host of 16 cores, the arithmetic of
// a GPU, and how much of the first a step does not hide (docs/benchmarks/h200-layouts.md).
constexpr double kHostSecondsPerElement = 0.35e-9;
constexpr double kDeviceFlops = 400e12;
constexpr double kHostShown = 0.5;
// Of any offload: what its copies take, and the start, which pins the memory.
constexpr double kOffloadLeast = 0.03;
// Of memory between ranks, and what moving blocks must save of it.
constexpr double kImbalanceMin = 0.05;

// What a tensor rank's memory depends on: its shares of heads, MLP columns and vocabulary.
using Shares = std::tuple<int64_t, int64_t, int64_t, int64_t>;

Shares SharesOf(const parallel::ModelDescription& model, const parallel::ModelParallel& part) {
  const auto size = [&](const char* name, const char* otherwise, int64_t factor) {
    const auto found = model.sizes.find(name);
    return found != model.sizes.end() ? found->second : factor * model.sizes.at(otherwise);
  };
  const auto held =
      parallel::TensorPart::Make(part, model.sizes.at("heads"), size("kv_heads", "heads", 1),
                                 size("ffn", "hidden", 4), model.sizes.at("vocab"));
  return {held.heads.size(), held.kv_heads.size(), held.ffn.size(), held.vocab.size()};
}

RankPlan::Whole WholeOf(const parallel::TrainerPlace& place, int head) {
  RankPlan::Whole whole;
  if (place.options.zero < 2) return whole;
  const parallel::ParameterRegistry& parameters = place.model.parameters();
  const parallel::FlatLayout layout(parameters, parallel::LayoutOptionsOf(place));
  for (parallel::ParameterId id = 0; id < parameters.size(); ++id) {
    const parallel::Parameter& parameter = parameters.at(id);
    if (layout.buckets()[layout.bucket_of(id)].block >= 0) continue;
    if (parameter.sharing == parallel::TensorSharing::kShared) {
      whole.keys += parameter.elements();
    } else if (parameter.block <= 0 || parameter.block >= head) {
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
  std::vector<int64_t> pieces;  // TrainerPlace::workspace; empty: each takes what it needs
  bool too_uneven = false;
};

// Of the ranks of this one's tensor group. `blocks` instead of what the spec says, if given.
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
        parallel::WorkspacePieces(PlaceOf(spec, split, place.options, *model, coordinate)));
  }
  Alignment alignment = {.pieces = parallel::MostOfEach(ranks)};
  alignment.too_uneven = alignment.pieces.empty();
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
  if (!aligned.pieces.empty()) place.workspace = &aligned.pieces;
  rank.too_uneven = aligned.too_uneven;
  rank.memory = parallel::PredictMemory(place, device);
  rank.sent = parallel::PredictVolume(place, part, device);
  rank.whole = WholeOf(place, head);
  return rank;
}

// Idle over all time of the ranks, every block at its estimated cost.
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

DeviceKind DeviceOf(const v1::JobSpec& spec) {
  return spec.resources().device() == v1::DEVICE_KIND_CUDA ? DeviceKind::kCuda : DeviceKind::kCpu;
}

// One way to change a spec, and what it is estimated to cost.
struct Candidate {
  v1::JobSpec spec;
  std::vector<std::string> settings;
  double slowdown = 1;
  // Layout, micro-batch, ZeRO and offload, by number: those that begin alike are alike but for what
  // follows, recomputation and order last. Empty: alone.
  std::vector<int> place;
  int number = 0;  // of those with the same beginning the last one takes the least memory
};

const char* Name(v1::Recompute recompute) {
  return recompute == v1::RECOMPUTE_FULL ? "full" : "selective";
}

// The pipeline's steps over micro-batches: how much longer a step takes than its work.
double PipelineFactor(int64_t stages, int64_t micro_batches) {
  return 1 +
         static_cast<double>(stages - 1) / static_cast<double>(std::max<int64_t>(1, micro_batches));
}

double CostOf(v1::Recompute mode) {
  return mode == v1::RECOMPUTE_FULL ? 1.30 : mode == v1::RECOMPUTE_SELECTIVE ? 1.02 : 1.0;
}

class Search {
 public:
  // `less_offload`: what is on the host now is too much for it.
  Search(const v1::JobSpec& spec, bool less_offload) : spec_(spec), less_offload_(less_offload) {
    const auto model = parallel::MakeModel(Describe(spec.engine().model()));
    if (!model.ok()) return;
    const double tokens = static_cast<double>(spec.engine().training().global_batch()) *
                          static_cast<double>(spec.engine().model().sequence_length());
    const double seconds = static_cast<double>((*model)->training_flops_per_token()) * tokens /
                           spec.resources().ranks() / kDeviceFlops;
    offload_cost_ = kHostShown * kHostSecondsPerElement *
                    static_cast<double>((*model)->parameters().elements()) / seconds;
  }

  // All valid changes, the cheapest first; of equal ones, those that change less.
  std::vector<Candidate> Candidates() {
    for (const int more_tensor : {1, 2, 4, 8}) {
      for (const int more_pipeline : {1, 2, 4, 8}) Layout(more_tensor, more_pipeline);
    }
    std::stable_sort(found_.begin(), found_.end(), [](const Candidate& a, const Candidate& b) {
      return std::make_pair(a.slowdown, a.settings.size()) <
             std::make_pair(b.slowdown, b.settings.size());
    });
    return std::move(found_);
  }

 private:
  void Layout(int more_tensor, int more_pipeline) {
    const v1::ParallelSpec& before = spec_.engine().parallel();
    const int taken = more_tensor * more_pipeline;
    if (before.data() % taken != 0) return;
    Candidate candidate = {spec_, {}, 1, {++places_}};
    v1::ParallelSpec& after = *candidate.spec.mutable_engine()->mutable_parallel();
    after.set_tensor(before.tensor() * more_tensor);
    after.set_pipeline(before.pipeline() * more_pipeline);
    after.set_data(before.data() / taken);
    if (after.zero_shards() > after.data() * after.context()) after.set_zero_shards(0);
    if (more_tensor > 1) {
      candidate.settings.push_back(absl::StrCat("engine.parallel.tensor=", after.tensor()));
      if (!before.tensor_shares().empty()) {
        after.clear_tensor_shares();
        candidate.settings.push_back("engine.parallel.tensor_shares=null");
      }
      if (!after.sequence()) {
        after.set_sequence(true);
        candidate.settings.push_back("engine.parallel.sequence=true");
      }
    }
    if (more_pipeline > 1) {
      candidate.settings.push_back(absl::StrCat("engine.parallel.pipeline=", after.pipeline()));
    }
    // Numbers of another pipeline do not fit this one.
    if (more_pipeline > 1 && !before.pipeline_blocks().empty()) {
      after.clear_pipeline_blocks();
      candidate.settings.push_back("engine.parallel.pipeline_blocks=null");
    }
    if (taken > 1) {
      candidate.settings.push_back(absl::StrCat("engine.parallel.data=", after.data()));
    }
    for (int doubled = 1; doubled < more_tensor; doubled *= 2) candidate.slowdown *= 1.08;
    Batches(candidate);
  }

  void Batches(const Candidate& from) {
    const v1::ParallelSpec& before = spec_.engine().parallel();
    double slowdown = from.slowdown;
    for (int64_t size = from.spec.engine().training().micro_batch();; size /= 2) {
      Candidate candidate = from;
      v1::TrainingSpec& training = *candidate.spec.mutable_engine()->mutable_training();
      if (size != training.micro_batch()) {
        candidate.settings.push_back(absl::StrCat("engine.training.micro_batch=", size));
      }
      const auto steps = [](const v1::TrainingSpec& of, const v1::ParallelSpec& split) {
        return of.global_batch() / std::max<int64_t>(1, of.micro_batch() * split.data());
      };
      const double pipeline_before =
          PipelineFactor(before.pipeline(), steps(spec_.engine().training(), before));
      training.set_micro_batch(size);
      const v1::ParallelSpec& after = candidate.spec.engine().parallel();
      candidate.slowdown =
          slowdown * PipelineFactor(after.pipeline(), steps(training, after)) / pipeline_before;
      candidate.place.push_back(++places_);
      Zero(candidate);
      if (size % 2 != 0) return;
      slowdown *= 1.04;
    }
  }

  void Zero(const Candidate& from) {
    const v1::ParallelSpec& split = from.spec.engine().parallel();
    for (int stage = split.zero(); stage <= 3; ++stage) {
      if (stage > split.zero() && split.data() * split.context() == 1) return;
      Candidate candidate = from;
      if (stage != split.zero()) {
        candidate.spec.mutable_engine()->mutable_parallel()->set_zero(stage);
        candidate.settings.push_back(absl::StrCat("engine.parallel.zero=", stage));
        constexpr std::array<double, 4> kFactors = {1, 1, 1.01, 1.05};
        candidate.slowdown *= kFactors[stage] / kFactors[split.zero()];
      }
      candidate.place.push_back(++places_);
      Recompute(candidate);
    }
  }

  void Recompute(const Candidate& from) {
    const v1::TrainingSpec& given = from.spec.engine().training();
    const v1::Recompute before = given.recompute();
    for (const v1::Recompute after :
         {v1::RECOMPUTE_NONE, v1::RECOMPUTE_SELECTIVE, v1::RECOMPUTE_FULL}) {
      if (after < before) continue;
      Candidate candidate = from;
      v1::TrainingSpec& training = *candidate.spec.mutable_engine()->mutable_training();
      if (after != before) {
        training.set_recompute(after);
        candidate.settings.push_back(absl::StrCat("engine.training.recompute=", Name(after)));
        candidate.slowdown *= CostOf(after) / CostOf(before);
      }
      Offload(candidate);
      // Of all blocks, where it was of some.
      if (given.recompute_blocks() == 0 || after == v1::RECOMPUTE_NONE) continue;
      training.set_recompute_blocks(0);
      candidate.settings.push_back("engine.training.recompute_blocks=0");
      if (after == before) candidate.slowdown *= 1 + (CostOf(after) - 1) / 2;
      Offload(std::move(candidate));
    }
  }

  void Offload(Candidate from) {
    from.place.push_back(0);
    Keep(from);
    Order(from);
    if (from.spec.resources().device() != v1::DEVICE_KIND_CUDA) return;
    const v1::ParallelSpec& split = from.spec.engine().parallel();
    const double before = split.offload().optimizer();
    int64_t parts = int64_t{split.tensor()} * split.pipeline();
    if (split.zero() > 0) {
      parts *= split.zero_shards() > 0 ? split.zero_shards() : split.data() * split.context();
    }
    for (const double share : {0.0, 0.25, 0.5, 0.75, 1.0}) {
      if (share == before || (share < before && !less_offload_)) continue;
      Candidate candidate = from;
      candidate.spec.mutable_engine()->mutable_parallel()->mutable_offload()->set_optimizer(share);
      candidate.settings.push_back(absl::StrCat("engine.parallel.offload.optimizer=", share));
      const double cost = offload_cost_ / static_cast<double>(parts);
      const auto factor = [&](double of) { return of > 0 ? 1 + kOffloadLeast + cost * of : 1; };
      candidate.slowdown *= factor(share) / factor(before);
      candidate.place.back() = 1 + static_cast<int>(4 * share);
      Keep(candidate);
      Order(std::move(candidate));
    }
  }

  // One buffer for the gradients of all micro-batches: no slower, but other bits in every layout.
  void Order(Candidate candidate) {
    v1::TrainingSpec& training = *candidate.spec.mutable_engine()->mutable_training();
    const int64_t at_once = training.micro_batch() * candidate.spec.engine().parallel().data();
    if (training.any_order() || training.global_batch() <= at_once) return;
    training.set_any_order(true);
    candidate.settings.push_back("engine.training.any_order=true");
    candidate.slowdown *= 1.005;
    Keep(std::move(candidate));
  }

  void Keep(Candidate candidate) {
    if (candidate.settings.empty() || !spec::Validate(candidate.spec).ok()) return;
    candidate.number = static_cast<int>(found_.size());
    found_.push_back(std::move(candidate));
  }

  const v1::JobSpec& spec_;
  const bool less_offload_;
  double offload_cost_ = 0;  // of all of it on one rank, over a step's time
  int places_ = 0;
  std::vector<Candidate> found_;
};

// Recomputation that a change has brought, for no more blocks than it takes to fit.
class FewerBlocks {
 public:
  FewerBlocks(const v1::JobSpec& spec, const std::function<bool(const JobPlan&)>& fits)
      : before_(spec.engine().training()), fits_(fits) {}

  Change Of(Candidate candidate, JobPlan plan) {
    const v1::TrainingSpec& training = candidate.spec.engine().training();
    const bool more = training.recompute() != before_.recompute() ||
                      training.recompute_blocks() != before_.recompute_blocks();
    int all = 0;
    for (const RankPlan& rank : plan.ranks) all = std::max(all, rank.blocks);
    const double dearest = candidate.slowdown, cost = CostOf(training.recompute());
    Change best = {candidate.settings, dearest, std::move(plan)};
    if (!more || training.recompute() == v1::RECOMPUTE_NONE || training.recompute_blocks() != 0) {
      return best;
    }
    for (int too_few = 0, enough = all; enough - too_few > 1;) {
      const int blocks = (too_few + enough) / 2;
      candidate.spec.mutable_engine()->mutable_training()->set_recompute_blocks(blocks);
      absl::StatusOr<JobPlan> fewer = absl::UnknownError("");
      if (spec::Validate(candidate.spec).ok()) fewer = PlanJob(candidate.spec);
      if (!fewer.ok() || !fits_(*fewer)) {
        too_few = blocks;
        continue;
      }
      enough = blocks;
      best.settings = candidate.settings;
      best.settings.erase(std::remove(best.settings.begin(), best.settings.end(),
                                      "engine.training.recompute_blocks=0"),
                          best.settings.end());
      best.settings.push_back(absl::StrCat("engine.training.recompute_blocks=", blocks));
      best.slowdown = dearest / cost * (1 + (cost - 1) * blocks / all);
      best.plan = *std::move(fewer);
    }
    return best;
  }

 private:
  const v1::TrainingSpec& before_;
  const std::function<bool(const JobPlan&)>& fits_;
};

// The work of the slowest stage.
double SlowestStage(const std::vector<double>& costs, const std::vector<int>& boundaries) {
  double slowest = 0;
  for (size_t i = 0; i + 1 < boundaries.size(); ++i) {
    const auto at = [&](int boundary) { return costs.begin() + boundary; };
    slowest = std::max(slowest, std::accumulate(at(boundaries[i]), at(boundaries[i + 1]), 0.0));
  }
  return slowest;
}

// What the rank with the largest share of a stage needs, were it to hold these blocks.
absl::StatusOr<int64_t> StageBytes(const v1::JobSpec& spec, int stage,
                                   parallel::BlockRange blocks) {
  // Of equal shares the first one is no smaller than the others.
  const auto& shares = spec.engine().parallel().tensor_shares();
  const auto tensor =
      static_cast<int>(std::max_element(shares.begin(), shares.end()) - shares.begin());
  return RankBytes(spec, parallel::PerAxis(stage, 0, 0, tensor), blocks);
}

// Blocks moved between the stages of a pipeline with one part each.
class Mover {
 public:
  explicit Mover(const v1::JobSpec& spec)
      : spec_(spec), stages_(spec.engine().parallel().pipeline()) {}

  // From stages that do not fit to those that have room, as evenly in work as that goes.
  std::optional<Candidate> Within(int64_t bytes) {
    if (stages_ == 1 || spec_.engine().parallel().pipeline_chunks() != 1) return std::nullopt;
    const auto costs = parallel::BlockCosts(Describe(spec_.engine().model()));
    if (!costs.ok()) return std::nullopt;
    const int last = static_cast<int>(costs->size());
    const auto moved = parallel::PartitionLayersWithin(
        *costs, stages_,
        [&](int stage, int begin, int end) { return Bytes(stage, begin, end, last) <= bytes; });
    if (!moved.ok()) return std::nullopt;
    std::vector<int> before = {0};
    for (int stage = 0; stage < stages_; ++stage) {
      const auto part = PartOf(spec_, parallel::PerAxis(stage, 0, 0, 0));
      if (!part.ok()) return std::nullopt;
      before.push_back(part->parts[0].end);
    }
    Candidate candidate = {spec_, {}, SlowestStage(*costs, *moved) / SlowestStage(*costs, before)};
    auto& blocks = *candidate.spec.mutable_engine()->mutable_parallel()->mutable_pipeline_blocks();
    blocks.Clear();
    for (int stage = 0; stage < stages_; ++stage) {
      const int ends = (stage == 0 ? 1 : 0) + (stage + 1 == stages_ ? 1 : 0);
      blocks.Add((*moved)[stage + 1] - (*moved)[stage] - ends);
    }
    candidate.settings = {
        absl::StrCat("engine.parallel.pipeline_blocks=[", absl::StrJoin(blocks, ","), "]")};
    if (!spec::Validate(candidate.spec).ok()) return std::nullopt;
    return candidate;
  }

 private:
  int64_t Bytes(int stage, int begin, int end, int last) {
    const auto [entry, added] =
        known_.try_emplace({stage, end - begin, begin == 0, end == last}, kTooMuch);
    if (added) {
      const auto needed = StageBytes(spec_, stage, {begin, end});
      if (needed.ok()) entry->second = *needed;
    }
    return entry->second;
  }

  static constexpr int64_t kTooMuch = std::numeric_limits<int64_t>::max();
  const v1::JobSpec& spec_;
  const int stages_;
  std::map<std::tuple<int, int, bool, bool>, int64_t> known_;  // inner blocks are alike
};

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
  const DeviceKind device = DeviceOf(spec);
  parallel::TrainerPlace place = PlaceOf(spec, split, options, *model, coordinate);
  ASSIGN_OR_RETURN(const Alignment aligned, Align(spec, split, place, blocks, device));
  if (!aligned.pieces.empty()) place.workspace = &aligned.pieces;
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
  plan.device = DeviceOf(spec);
  plan.degrees = split.mesh.degrees();
  const int replicas = plan.degrees[Axis::kData] * plan.degrees[Axis::kContext];
  for (int stage = 0; stage < plan.degrees[Axis::kPipeline]; ++stage) {
    std::map<Shares, size_t> alike;  // by index in plan.ranks
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

std::optional<Change> CheapestFit(const v1::JobSpec& spec, int64_t bytes, int64_t host_bytes) {
  const bool cuda = DeviceOf(spec) == DeviceKind::kCuda;
  const std::function<bool(const JobPlan&)> fits = [&](const JobPlan& plan) {
    return plan.needed_bytes() <= bytes && (!cuda || plan.host_bytes() <= host_bytes);
  };
  const absl::StatusOr<JobPlan> now = PlanJob(spec);
  std::vector<Candidate> candidates =
      Search(spec, now.ok() && cuda && now->host_bytes() > host_bytes).Candidates();
  if (std::optional<Candidate> moved = Mover(spec).Within(bytes); moved.has_value()) {
    const auto dearer = std::find_if(
        candidates.begin(), candidates.end(),
        [&](const Candidate& candidate) { return candidate.slowdown > moved->slowdown; });
    candidates.insert(dearer, *std::move(moved));
  }
  // Where what takes least of all that begin alike is too large for the device, so are the others.
  std::map<std::vector<int>, const Candidate*> least;
  for (const Candidate& candidate : candidates) {
    for (std::vector<int> at = candidate.place; !at.empty(); at.pop_back()) {
      const Candidate*& known = least[at];
      if (known == nullptr || known->number < candidate.number) known = &candidate;
    }
  }
  int tries = 0;
  std::map<std::vector<int>, bool> hopeless;
  const auto is_hopeless = [&](const std::vector<int>& place) {
    std::vector<int> at;
    for (const int number : place) {
      at.push_back(number);
      const auto [entry, first] = hopeless.try_emplace(at, false);
      if (first) {
        ++tries;
        const absl::StatusOr<JobPlan> plan = PlanJob(least[at]->spec);
        entry->second = !plan.ok() || plan->needed_bytes() > bytes;
      }
      if (entry->second) return true;
    }
    return false;
  };
  for (Candidate& candidate : candidates) {
    if (is_hopeless(candidate.place)) continue;
    if (++tries > kTriesMax) break;
    absl::StatusOr<JobPlan> plan = PlanJob(candidate.spec);
    if (!plan.ok() || !fits(*plan)) continue;
    return FewerBlocks(spec, fits).Of(std::move(candidate), *std::move(plan));
  }
  return std::nullopt;
}

std::optional<Change> EvenMemory(const v1::JobSpec& spec, const JobPlan& plan) {
  if (plan.imbalance() < kImbalanceMin) return std::nullopt;
  Mover mover(spec);
  std::optional<Change> best;
  auto enough = static_cast<double>(plan.needed_bytes());
  double too_little = enough / (1 + plan.imbalance());  // the mean
  while (enough - too_little > kImbalanceMin / 8 * enough) {
    const double bytes = (enough + too_little) / 2;
    std::optional<Candidate> moved = mover.Within(static_cast<int64_t>(bytes));
    absl::StatusOr<JobPlan> after;
    if (moved.has_value()) after = PlanJob(moved->spec);
    if (!moved.has_value() || !after.ok()) {
      too_little = bytes;
      continue;
    }
    enough = std::min(bytes, static_cast<double>(after->needed_bytes()));
    best = Change{std::move(moved->settings), moved->slowdown, *std::move(after)};
  }
  const auto saved =
      best.has_value() ? static_cast<double>(plan.needed_bytes() - best->plan.needed_bytes()) : 0.0;
  if (saved < kImbalanceMin * static_cast<double>(plan.needed_bytes())) return std::nullopt;
  return best;
}

std::string EvenText(const Change& change) {
  return absl::StrFormat(
      "%s would even it: %s for the largest rank, about %.0f %% slower by "
      "estimate",
      absl::StrJoin(change.settings, " "), BytesText(change.plan.needed_bytes()),
      std::max(0.0, 100 * (change.slowdown - 1)));
}

std::string AdviceText(const std::optional<Change>& change) {
  if (!change.has_value()) {
    return "No change of recompute, any_order, zero, micro_batch, tensor, pipeline and "
           "offload.optimizer makes it fit: it needs more ranks, or devices with more memory";
  }
  return absl::StrFormat("%s would fit: %s for the largest rank, about %.0f %% slower by estimate",
                         absl::StrJoin(change->settings, " "),
                         BytesText(change->plan.needed_bytes()),
                         std::max(0.0, 100 * (change->slowdown - 1)));
}

std::string BytesText(int64_t bytes) {
  const auto amount = static_cast<double>(bytes);
  constexpr double kMiB = 1024 * 1024;
  if (amount >= 1024 * kMiB) return absl::StrFormat("%.2f GiB", amount / (1024 * kMiB));
  return absl::StrFormat("%.1f MiB", amount / kMiB);
}

}  // namespace muster::worker
