#include "worker/rank/balance.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <memory>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/comm/null_communicator.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/pipeline/partition.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_setup.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/memory_check.h"
#include "worker/rank/stage_blocks.h"

namespace muster::worker {
namespace {

using kernels::Stream;
using kernels::Tensor;
using parallel::Axis;
using parallel::FailureDomain;

constexpr int kRuns = 5;  // after a first one that makes plans and fills caches
// Of the fastest rank: fine enough for single heads.
constexpr double kShareUnits = 128;
// Ranks so little slower than the fastest count as fast as it: noise leaves equal devices equal
// shares, hence equal bits.
constexpr double kNoise = 1.0 / 32;
constexpr absl::Duration kPatience = absl::Minutes(5);  // how long ranks wait for each other
constexpr char kResultKey[] = "balance/result";

std::string KeyOf(int rank) { return absl::StrCat("balance/rank-", rank); }

// Times the embedding, the blocks and the head of a model.
class Stopwatch {
 public:
  // `layers`: all of these.
  Stopwatch(const parallel::Model& model, int layers, kernels::Device& device, Stream& stream)
      : model_(model), layers_(layers), device_(device), stream_(stream), events_(2 * layers) {}

  absl::Status Prepare(const parallel::FlatLayout& layout,
                       const parallel::FlatBuffersOptions& storage,
                       const parallel::BatchShape& shape) {
    ASSIGN_OR_RETURN(
        flat_, parallel::FlatBuffers::Make(device_, stream_, model_.parameters(), layout, storage));
    model_.TakeWorkspace(arena_, shape);
    RETURN_IF_ERROR(arena_.Commit(device_));
    workspace_ = model_.TakeWorkspace(arena_, shape);
    for (const Tensor& input :
         {workspace_.batch.tokens, workspace_.batch.targets, workspace_.batch.documents}) {
      if (!input.empty()) kernels::Zero(stream_, input);
    }
    for (auto& [begin, end] : events_) {
      ASSIGN_OR_RETURN(begin, device_.MakeEvent(/*timing=*/true));
      ASSIGN_OR_RETURN(end, device_.MakeEvent(/*timing=*/true));
    }
    return absl::OkStatus();
  }

  // Seconds of forward and backward of every layer.
  absl::StatusOr<std::vector<double>> Run(parallel::Communicator& tensor,
                                          parallel::Communicator& context) {
    parallel::Pass pass = {stream_, flat_->parameter_views()};
    pass.gradients = &flat_->gradient_views(0);
    pass.tensor = &tensor;
    pass.context = &context;
    workspace_.forward.branch = Tensor();
    for (int layer = 0; layer < layers_; ++layer) {
      Timed(layer, [&] { model_.Forward(pass, workspace_, {layer, layer + 1}); });
    }
    for (int layer = layers_; layer-- > 0;) {
      Timed(layers_ + layer, [&] { model_.Backward(pass, workspace_, {layer, layer + 1}); });
    }
    RETURN_IF_ERROR(stream_.Synchronize());
    std::vector<double> seconds(layers_);
    for (size_t i = 0; i < events_.size(); ++i) {
      seconds[i % layers_] += events_[i].second->SecondsSince(*events_[i].first);
    }
    return seconds;
  }

 private:
  template <typename Work>
  void Timed(int index, Work work) {
    stream_.Record(*events_[index].first);
    work();
    stream_.Record(*events_[index].second);
  }

  const parallel::Model& model_;
  const int layers_;
  kernels::Device& device_;
  Stream& stream_;
  std::unique_ptr<parallel::FlatBuffers> flat_;
  kernels::Arena arena_;
  parallel::Workspace workspace_;
  // Begin and end of forward of every layer, then of backward.
  std::vector<std::pair<std::unique_ptr<kernels::Event>, std::unique_ptr<kernels::Event>>> events_;
};

// Mean seconds, over the ranks, of the embedding, every block and the head.
std::vector<double> LayerCosts(const std::vector<RankMeasure>& ranks, const v1::JobSpec& spec) {
  const auto mean = [&](const auto& seconds) {
    double sum = 0;
    for (const RankMeasure& rank : ranks) sum += seconds(rank);
    return sum / static_cast<double>(ranks.size());
  };
  const v1::ModelSpec& model = spec.engine().model();
  std::vector<double> costs(static_cast<size_t>(model.layers()) + 2,
                            mean([](const RankMeasure& rank) { return rank.block; }));
  if (!ranks.front().kinds.empty()) {
    const std::vector<int> kinds = KindsOf(model);
    for (size_t i = 0; i < kinds.size(); ++i) {
      costs[i + 1] = mean([&](const RankMeasure& rank) { return rank.kinds[kinds[i]]; });
    }
  }
  costs.front() = mean([](const RankMeasure& rank) { return rank.embedding; });
  costs.back() = mean([](const RankMeasure& rank) { return rank.head; });
  return costs;
}

absl::Status EvenStages(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec) {
  v1::ParallelSpec& split = *spec.mutable_engine()->mutable_parallel();
  ASSIGN_OR_RETURN(const std::vector<int> ends,
                   parallel::PartitionLayers(LayerCosts(ranks, spec),
                                             split.pipeline() * split.pipeline_chunks()));
  SetPipelineBlocks(ends, split);
  return absl::OkStatus();
}

void EvenShares(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec) {
  v1::ParallelSpec& split = *spec.mutable_engine()->mutable_parallel();
  std::vector<double> speeds(split.tensor(), std::numeric_limits<double>::infinity());
  for (const RankMeasure& rank : ranks) {
    speeds[rank.tensor] = std::min(speeds[rank.tensor], rank.share / rank.block);
  }
  const double fastest = *std::max_element(speeds.begin(), speeds.end());
  for (double& speed : speeds) {
    speed = speed >= (1 - kNoise) * fastest
                ? kShareUnits
                : std::max(1.0, std::round(kShareUnits * speed / fastest));
  }
  if (*std::min_element(speeds.begin(), speeds.end()) == kShareUnits) return;
  for (const double speed : speeds) split.add_tensor_shares(speed);
}

// Reduces what measured times ask for until it fits into the ranks' memory.
class MemoryLimits {
 public:
  MemoryLimits(const std::vector<RankMeasure>& ranks, bool stages, bool shares)
      : ranks_(ranks), stages_(stages), shares_(shares) {
    for (const RankMeasure& rank : ranks) {
      if (rank.memory_bytes <= 0) continue;
      const auto [entry, added] =
          available_.try_emplace({rank.stage, rank.tensor}, rank.memory_bytes);
      entry->second = std::min(entry->second, rank.memory_bytes);
    }
  }

  // Returns what did not fit; "" when `spec` is unchanged.
  std::string Apply(v1::JobSpec& spec) {
    const std::vector<Excess> first = Over(spec);
    if (first.empty()) return "";
    v1::JobSpec changed = spec;
    bool fits = CutStages(changed);
    for (int tries = 0; shares_ && !fits && tries < kTriesMax; ++tries) {
      if (!Shrink(changed)) break;
      fits = Over(changed).empty() || CutStages(changed);
    }
    if (!fits) return "";
    spec = std::move(changed);
    return absl::StrFormat("by time alone stage %d, tensor rank %d would need %s of its %s",
                           first[0].stage, first[0].tensor, BytesText(first[0].needed),
                           BytesText(first[0].available));
  }

 private:
  struct Excess {
    int stage = 0, tensor = 0;
    int64_t needed = 0, available = 0;
  };
  static constexpr int kTriesMax = 48;

  std::vector<Excess> Over(const v1::JobSpec& spec) const {
    std::vector<Excess> over;
    for (const auto& [place, available] : available_) {
      const auto needed = RankBytes(spec, parallel::PerAxis(place.first, 0, 0, place.second));
      if (needed.ok() && *needed <= available) continue;
      over.push_back({place.first, place.second, needed.ok() ? *needed : kTooMuch, available});
    }
    return over;
  }

  // Moves blocks between stages, if these are measured and have one model chunk each.
  bool CutStages(v1::JobSpec& spec) const {
    v1::ParallelSpec& split = *spec.mutable_engine()->mutable_parallel();
    if (!stages_ || split.pipeline_chunks() != 1) return false;
    const std::vector<double> costs = LayerCosts(ranks_, spec);
    const std::vector<int> kinds = KindsOf(spec.engine().model());
    std::map<StageBlocks, bool> known;
    const auto fits = [&](int stage, int begin, int end) {
      const auto [entry, added] =
          known.try_emplace(StageBlocksOf({stage, begin, end}, kinds), true);
      for (auto at = available_.lower_bound({stage, 0});
           added && entry->second && at != available_.end() && at->first.first == stage; ++at) {
        const auto needed = RankBytes(spec, parallel::PerAxis(stage, 0, 0, at->first.second),
                                      parallel::BlockRange{begin, end});
        entry->second = needed.ok() && *needed <= at->second;
      }
      return entry->second;
    };
    const auto ends = parallel::PartitionLayersWithin(costs, split.pipeline(), fits);
    if (!ends.ok()) return false;
    SetPipelineBlocks(*ends, split);
    return true;
  }

  // Reduces each share that needs too much in proportion. Some of the memory does not depend on the
  // share, and shares are rounded to whole heads and columns, so it may take several rounds.
  bool Shrink(v1::JobSpec& spec) const {
    v1::ParallelSpec& split = *spec.mutable_engine()->mutable_parallel();
    std::vector<double> factors(split.tensor(), 1);
    for (const Excess& excess : Over(spec)) {
      factors[excess.tensor] =
          std::min(factors[excess.tensor],
                   static_cast<double>(excess.available) / static_cast<double>(excess.needed));
    }
    // Reducing every share by the same factor changes nothing.
    if (*std::max_element(factors.begin(), factors.end()) < 1) return false;
    if (split.tensor_shares().empty()) {
      for (int i = 0; i < split.tensor(); ++i) split.add_tensor_shares(kShareUnits);
    }
    for (int i = 0; i < split.tensor(); ++i) {
      if (factors[i] == 1) continue;
      const double share = std::floor(100 * factors[i] * split.tensor_shares(i)) / 100;
      split.set_tensor_shares(i, std::max(0.01, share));
    }
    return true;
  }

  static constexpr int64_t kTooMuch = std::numeric_limits<int64_t>::max();
  const std::vector<RankMeasure>& ranks_;
  const bool stages_, shares_;  // whether each is measured
  // Available bytes by stage and tensor rank: the least of all ranks there.
  std::map<std::pair<int, int>, int64_t> available_;
};

// Why some tensor rank cannot run the shares of `spec`, or "": all-to-all attention needs a
// multiple of the context ranks as its number of heads.
std::string CannotRun(const v1::JobSpec& spec) {
  for (int rank = 0; rank < spec.engine().parallel().tensor(); ++rank) {
    const auto model = BuildModel(spec, parallel::PerAxis(0, 0, 0, rank));
    if (!model.ok()) return std::string(model.status().message());
  }
  return "";
}

bool Stages(const v1::ParallelSpec& split) {
  return split.pipeline() > 1 && split.pipeline_blocks().empty();
}
bool Shares(const v1::ParallelSpec& split) {
  return split.tensor() > 1 && split.tensor_shares().empty();
}

std::string ToText(const RankMeasure& rank) {
  std::string text =
      absl::StrFormat("%d %d %.17g %.17g %.17g %.17g %d", rank.stage, rank.tensor, rank.share,
                      rank.embedding, rank.block, rank.head, rank.memory_bytes);
  for (const double seconds : rank.kinds) absl::StrAppendFormat(&text, " %.17g", seconds);
  return text;
}

absl::StatusOr<RankMeasure> FromText(const std::string& text, size_t kinds) {
  const std::vector<std::string> parts = absl::StrSplit(text, ' ');
  RankMeasure rank;
  rank.kinds.resize(kinds);
  bool good = parts.size() == 7 + kinds;
  for (size_t i = 0; good && i < kinds; ++i) {
    good = absl::SimpleAtod(parts[7 + i], &rank.kinds[i]);
  }
  if (!good || !absl::SimpleAtoi(parts[0], &rank.stage) ||
      !absl::SimpleAtoi(parts[1], &rank.tensor) || !absl::SimpleAtod(parts[2], &rank.share) ||
      !absl::SimpleAtod(parts[3], &rank.embedding) || !absl::SimpleAtod(parts[4], &rank.block) ||
      !absl::SimpleAtod(parts[5], &rank.head) || !absl::SimpleAtoi(parts[6], &rank.memory_bytes)) {
    return absl::InternalError(absl::StrCat("not a measurement of a rank: ", text));
  }
  return rank;
}

std::string Summary(const std::vector<RankMeasure>& ranks, const v1::ParallelSpec& split,
                    const std::string& given_up) {
  const RankMeasure& first = ranks.front();
  std::string text = absl::StrFormat(
      "measured: embedding %.3f ms, block %.3f ms, head %.3f ms of a micro-batch on rank 0",
      1e3 * first.embedding, 1e3 * first.block / std::max<double>(1, first.kinds.size()),
      1e3 * first.head);
  if (!split.pipeline_blocks().empty()) {
    absl::StrAppend(&text, "; engine.parallel.pipeline_blocks=[",
                    absl::StrJoin(split.pipeline_blocks(), ","), "]");
  }
  if (!split.tensor_shares().empty()) {
    absl::StrAppend(&text, "; engine.parallel.tensor_shares=[",
                    absl::StrJoin(split.tensor_shares(), ","), "]");
  } else if (split.tensor() > 1 && given_up.empty()) {
    absl::StrAppend(&text, "; tensor ranks are equally fast");
  }
  if (!given_up.empty()) absl::StrAppend(&text, "; ", given_up);
  return text;
}

}  // namespace

absl::StatusOr<RankMeasure> MeasureRank(const v1::JobSpec& spec,
                                        const parallel::PerAxis& coordinate,
                                        kernels::Device& device) {
  ASSIGN_OR_RETURN(const SplitRun split, SplitOf(spec));
  ASSIGN_OR_RETURN(parallel::ModelParallel part, PartOf(spec, coordinate));
  part.parts.clear();
  part.split_backward = false;
  part.offload_activations = false;
  part.recompute_blocks = 0;
  const v1::ModelSpec& whole = spec.engine().model();
  const auto blocks = static_cast<int>(
      parallel::KindsOfBlocks(parallel::ConfigOf(Describe(whole))).first_block.size());
  ASSIGN_OR_RETURN(const auto model, parallel::MakeModelOfKinds(Describe(whole), part));
  parallel::TrainerOptions options = OptionsOf(spec);
  options.zero = 0;
  options.offload_optimizer = 0;
  options.compression = {};
  const parallel::TrainerPlace place = {.options = options,
                                        .model = *model,
                                        .mesh = split.mesh,
                                        .coordinate = coordinate,
                                        .sequence_length = spec.engine().model().sequence_length()};
  parallel::FlatBuffersOptions storage;
  storage.compute = parallel::StorageOptionsOf(place).compute;
  const parallel::FlatLayout layout(model->parameters(), options.bucket_bytes, 1);
  ASSIGN_OR_RETURN(const auto stream, device.MakeStream());
  // Only the rank's own work is timed.
  parallel::NullCommunicator tensor(coordinate[Axis::kTensor], split.mesh.degree(Axis::kTensor),
                                    "tensor");
  parallel::NullCommunicator context(coordinate[Axis::kContext], split.mesh.degree(Axis::kContext),
                                     "context");
  RankMeasure measure;
  measure.stage = coordinate[Axis::kPipeline];
  measure.tensor = coordinate[Axis::kTensor];
  measure.share = 0;
  for (parallel::ParameterId id = 0; id < model->parameters().size(); ++id) {
    const parallel::Parameter& parameter = model->parameters().at(id);
    if (parameter.block >= 1 && parameter.block <= blocks)
      measure.share += static_cast<double>(parameter.elements());
  }
  Stopwatch watch(*model, blocks + 2, device, *stream);
  RETURN_IF_ERROR(watch.Prepare(layout, storage, parallel::BatchShapeOf(place)));
  std::vector<double> fastest(blocks + 2, std::numeric_limits<double>::infinity());
  for (int run = 0; run <= kRuns; ++run) {
    ASSIGN_OR_RETURN(const std::vector<double> seconds, watch.Run(tensor, context));
    for (size_t i = 0; run > 0 && i < seconds.size(); ++i) {
      fastest[i] = std::min(fastest[i], seconds[i]);
    }
  }
  measure.embedding = fastest.front();
  measure.head = fastest.back();
  for (int i = 0; i < blocks; ++i) measure.block += std::max(fastest[i + 1], 1e-9);
  if (blocks > 1) measure.kinds.assign(fastest.begin() + 1, fastest.end() - 1);
  return measure;
}

absl::StatusOr<std::string> Even(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec) {
  CHECK(!ranks.empty());
  const v1::ParallelSpec& split = spec.engine().parallel();
  const bool stages = Stages(split), shares = Shares(split);
  std::vector<std::string> given_up;
  if (shares) {
    EvenShares(ranks, spec);
    if (std::string why = CannotRun(spec); !why.empty()) {
      spec.mutable_engine()->mutable_parallel()->clear_tensor_shares();
      given_up.push_back("tensor ranks keep equal shares, since by speed " + why);
    }
  }
  if (stages) RETURN_IF_ERROR(EvenStages(ranks, spec));
  if (stages || shares) {
    if (std::string why = MemoryLimits(ranks, stages, shares).Apply(spec); !why.empty()) {
      given_up.push_back(std::move(why));
    }
  }
  return absl::StrJoin(given_up, "; ");
}

bool Balances(const v1::JobSpec& spec) {
  const v1::ParallelSpec& split = spec.engine().parallel();
  return split.balance() == v1::BALANCE_MEASURED && (Stages(split) || Shares(split));
}

absl::StatusOr<v1::JobSpec> BalancedSpec(const v1::RankAssignment& assignment,
                                         parallel::KeyValueStore& store, std::string& summary) {
  v1::JobSpec spec = assignment.spec();
  spec::ApplyDefaults(spec);
  const v1::ParallelSpec& split = spec.engine().parallel();
  if (!Balances(spec)) return spec;
  if (absl::Status status = spec::Validate(spec); !status.ok()) {
    return parallel::Mark(std::move(status), FailureDomain::kConfiguration);
  }
  ASSIGN_OR_RETURN(const SplitRun run, SplitOf(spec));
  ASSIGN_OR_RETURN(const auto device, MakeDevice(assignment));
  auto own = MeasureRank(spec, run.mesh.CoordinateOf(assignment.rank()), *device);
  if (!own.ok()) {
    return parallel::Mark(
        Annotate(own.status(), "engine.parallel.balance: measured"),
        absl::IsResourceExhausted(own.status()) ? FailureDomain::kMemory : FailureDomain::kDevice);
  }
  if (const auto memory = device->Memory(); memory.ok()) {
    own->memory_bytes = AvailableBytes(assignment, device->kind(), *memory);
  }
  const auto failed = [](const absl::Status& status) {
    return parallel::Mark(Annotate(status, "engine.parallel.balance: measured"),
                          FailureDomain::kCommunication);
  };
  if (assignment.rank() != 0) {
    const absl::Status put = store.Put(KeyOf(assignment.rank()), ToText(*own));
    if (!put.ok()) return failed(put);
    const auto decided = store.Get(kResultKey, 2 * kPatience);
    if (!decided.ok()) return failed(decided.status());
    if (!spec.mutable_engine()->mutable_parallel()->ParseFromString(*decided)) {
      return failed(absl::InternalError("rank 0 has published no layout"));
    }
    return spec;
  }
  std::vector<RankMeasure> ranks = {*own};
  for (int rank = 1; rank < assignment.world_size(); ++rank) {
    const auto text = store.Get(KeyOf(rank), kPatience);
    if (!text.ok()) return failed(Annotate(text.status(), absl::StrCat("rank ", rank)));
    ASSIGN_OR_RETURN(ranks.emplace_back(), FromText(*text, own->kinds.size()));
  }
  const absl::StatusOr<std::string> given_up = Even(ranks, spec);
  if (!given_up.ok()) return parallel::Mark(given_up.status(), FailureDomain::kConfiguration);
  const absl::Status put = store.Put(kResultKey, split.SerializeAsString());
  if (!put.ok()) return failed(put);
  summary = Summary(ranks, split, *given_up);
  return spec;
}

}  // namespace muster::worker
