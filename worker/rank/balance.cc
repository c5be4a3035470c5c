#include "worker/rank/balance.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
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
#include "kernels/ops.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/pipeline/partition.h"
#include "parallel/train/failure.h"
#include "parallel/train/memory.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_setup.h"

namespace muster::worker {
namespace {

using kernels::Stream;
using kernels::Tensor;
using parallel::Axis;
using parallel::FailureDomain;

constexpr int kRuns = 5;  // beside the first, which makes plans and caches
// Noise below a sixteenth leaves equal devices equal shares, and with them the same bits.
constexpr double kShareUnits = 16;
constexpr absl::Duration kPatience = absl::Minutes(5);  // of ranks for each other
constexpr char kResultKey[] = "balance/result";

std::string KeyOf(int rank) { return absl::StrCat("balance/rank-", rank); }

// A group that is not there: a rank's own work alone is timed.
class AbsentGroup : public parallel::Communicator {
 public:
  AbsentGroup(int rank, int size) : rank_(rank), size_(size) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  const std::string& name() const override { return name_; }
  void AllReduce(Stream&, Tensor, parallel::ReduceOp) override {}
  void ReduceScatter(Stream&, Tensor, parallel::ReduceOp) override {}
  void AllGather(Stream&, Tensor) override {}
  void Broadcast(Stream&, Tensor, int) override {}
  void AllToAll(Stream&, Tensor, Tensor) override {}
  void Send(Stream&, Tensor, int) override {}
  void Receive(Stream&, Tensor, int) override {}
  void GroupBegin() override {}
  void GroupEnd(Stream&) override {}
  absl::Status Barrier() override { return absl::OkStatus(); }
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int, int, const std::string&) override {
    return absl::UnimplementedError("a group that is not there has no parts");
  }
  void Abort(absl::Status) override {}
  int64_t bytes_sent() const override { return 0; }

 private:
  const int rank_, size_;
  const std::string name_ = "absent";
};

// Times the layers of a model of one block: embedding, block, head.
class Stopwatch {
 public:
  static constexpr int kLayers = 3;

  Stopwatch(const parallel::Model& model, kernels::Device& device, Stream& stream)
      : model_(model), device_(device), stream_(stream) {}

  absl::Status Prepare(const parallel::FlatLayout& layout,
                       const parallel::FlatBuffersOptions& storage,
                       const parallel::BatchShape& shape) {
    ASSIGN_OR_RETURN(
        flat_, parallel::FlatBuffers::Make(device_, stream_, model_.parameters(), layout, storage));
    model_.TakeWorkspace(arena_, shape);
    RETURN_IF_ERROR(arena_.Commit(device_));
    workspace_ = model_.TakeWorkspace(arena_, shape);
    for (const Tensor& input :
         {workspace_.flow.tokens, workspace_.flow.targets, workspace_.flow.documents}) {
      if (!input.empty()) kernels::Zero(stream_, input);
    }
    for (auto& [begin, end] : events_) {
      ASSIGN_OR_RETURN(begin, device_.MakeEvent(/*timing=*/true));
      ASSIGN_OR_RETURN(end, device_.MakeEvent(/*timing=*/true));
    }
    return absl::OkStatus();
  }

  // Seconds of every layer, forward and backward.
  absl::StatusOr<std::array<double, kLayers>> Run(parallel::Communicator& tensor,
                                                  parallel::Communicator& context) {
    parallel::Pass pass = {stream_, flat_->parameter_views()};
    pass.gradients = &flat_->gradient_views(0);
    pass.tensor = &tensor;
    pass.context = &context;
    workspace_.flow.branch = Tensor();
    for (int layer = 0; layer < kLayers; ++layer) {
      Timed(layer, [&] { model_.Forward(pass, workspace_, {layer, layer + 1}); });
    }
    for (int layer = kLayers; layer-- > 0;) {
      Timed(kLayers + layer, [&] { model_.Backward(pass, workspace_, {layer, layer + 1}); });
    }
    RETURN_IF_ERROR(stream_.Synchronize());
    std::array<double, kLayers> seconds{};
    for (size_t i = 0; i < events_.size(); ++i) {
      seconds[i % kLayers] += events_[i].second->SecondsSince(*events_[i].first);
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
  kernels::Device& device_;
  Stream& stream_;
  std::unique_ptr<parallel::FlatBuffers> flat_;
  kernels::Arena arena_;
  parallel::Workspace workspace_;
  // Of forward, then of backward.
  std::array<std::pair<std::unique_ptr<kernels::Event>, std::unique_ptr<kernels::Event>>,
             2 * kLayers>
      events_;
};

absl::Status EvenStages(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec) {
  v1::ParallelSpec& split = *spec.mutable_engine()->mutable_parallel();
  const auto mean = [&](double RankMeasure::*seconds) {
    double sum = 0;
    for (const RankMeasure& rank : ranks) sum += rank.*seconds;
    return sum / static_cast<double>(ranks.size());
  };
  std::vector<double> costs(static_cast<size_t>(spec.engine().model().layers()) + 2,
                            mean(&RankMeasure::block));
  costs.front() = mean(&RankMeasure::embedding);
  costs.back() = mean(&RankMeasure::head);
  const int parts = split.pipeline() * split.pipeline_chunks();
  ASSIGN_OR_RETURN(const std::vector<int> ends, parallel::PartitionLayers(costs, parts));
  for (int part = 0; part < parts; ++part) {
    const int tables = (part == 0 ? 1 : 0) + (part + 1 == parts ? 1 : 0);
    split.add_pipeline_blocks(ends[part + 1] - ends[part] - tables);
  }
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
    speed = std::max(1.0, std::round(kShareUnits * speed / fastest));
  }
  if (*std::min_element(speeds.begin(), speeds.end()) == kShareUnits) return;
  for (const double speed : speeds) split.add_tensor_shares(speed);
}

bool Stages(const v1::ParallelSpec& split) {
  return split.pipeline() > 1 && split.pipeline_blocks().empty();
}
bool Shares(const v1::ParallelSpec& split) {
  return split.tensor() > 1 && split.tensor_shares().empty();
}

std::string ToText(const RankMeasure& rank) {
  return absl::StrFormat("%d %.17g %.17g %.17g %.17g", rank.tensor, rank.share, rank.embedding,
                         rank.block, rank.head);
}

absl::StatusOr<RankMeasure> FromText(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ' ');
  RankMeasure rank;
  if (parts.size() != 5 || !absl::SimpleAtoi(parts[0], &rank.tensor) ||
      !absl::SimpleAtod(parts[1], &rank.share) || !absl::SimpleAtod(parts[2], &rank.embedding) ||
      !absl::SimpleAtod(parts[3], &rank.block) || !absl::SimpleAtod(parts[4], &rank.head)) {
    return absl::InternalError(absl::StrCat("not a measurement of a rank: ", text));
  }
  return rank;
}

std::string Summary(const std::vector<RankMeasure>& ranks, const v1::ParallelSpec& split) {
  const RankMeasure& first = ranks.front();
  std::string text = absl::StrFormat(
      "measured: embedding %.3f ms, block %.3f ms, head %.3f ms of a micro-batch on rank 0",
      1e3 * first.embedding, 1e3 * first.block, 1e3 * first.head);
  if (!split.pipeline_blocks().empty()) {
    absl::StrAppend(&text, "; engine.parallel.pipeline_blocks=[",
                    absl::StrJoin(split.pipeline_blocks(), ","), "]");
  }
  if (!split.tensor_shares().empty()) {
    absl::StrAppend(&text, "; engine.parallel.tensor_shares=[",
                    absl::StrJoin(split.tensor_shares(), ","), "]");
  } else if (split.tensor() > 1) {
    absl::StrAppend(&text, "; tensor ranks are equally fast");
  }
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
  parallel::ModelDescription description = Describe(spec.engine().model());
  description.sizes["layers"] = 1;
  ASSIGN_OR_RETURN(const auto model, parallel::MakeModel(description, part));
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
  AbsentGroup tensor(coordinate[Axis::kTensor], split.mesh.degree(Axis::kTensor));
  AbsentGroup context(coordinate[Axis::kContext], split.mesh.degree(Axis::kContext));
  RankMeasure measure;
  measure.tensor = coordinate[Axis::kTensor];
  measure.share = 0;
  for (parallel::ParameterId id = 0; id < model->parameters().size(); ++id) {
    const parallel::Parameter& parameter = model->parameters().at(id);
    if (parameter.block == 1) measure.share += static_cast<double>(parameter.elements());
  }
  Stopwatch watch(*model, device, *stream);
  RETURN_IF_ERROR(watch.Prepare(layout, storage, parallel::BatchShapeOf(place)));
  std::array<double, Stopwatch::kLayers> fastest;
  fastest.fill(std::numeric_limits<double>::infinity());
  for (int run = 0; run <= kRuns; ++run) {
    ASSIGN_OR_RETURN(const auto seconds, watch.Run(tensor, context));
    for (size_t i = 0; run > 0 && i < seconds.size(); ++i) {
      fastest[i] = std::min(fastest[i], seconds[i]);
    }
  }
  measure.embedding = fastest[0];
  measure.block = std::max(fastest[1], 1e-9);
  measure.head = fastest[2];
  return measure;
}

absl::Status Even(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec) {
  CHECK(!ranks.empty());
  const v1::ParallelSpec& split = spec.engine().parallel();
  if (Shares(split)) EvenShares(ranks, spec);
  if (Stages(split)) RETURN_IF_ERROR(EvenStages(ranks, spec));
  return absl::OkStatus();
}

absl::StatusOr<v1::JobSpec> BalancedSpec(const v1::RankAssignment& assignment,
                                         parallel::KeyValueStore& store, std::string& summary) {
  v1::JobSpec spec = assignment.spec();
  spec::ApplyDefaults(spec);
  const v1::ParallelSpec& split = spec.engine().parallel();
  if (split.balance() != v1::BALANCE_MEASURED || !(Stages(split) || Shares(split))) return spec;
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
  const auto met = [](const absl::Status& status) {
    return parallel::Mark(Annotate(status, "engine.parallel.balance: measured"),
                          FailureDomain::kCommunication);
  };
  if (assignment.rank() != 0) {
    const absl::Status put = store.Put(KeyOf(assignment.rank()), ToText(*own));
    if (!put.ok()) return met(put);
    const auto decided = store.Get(kResultKey, 2 * kPatience);
    if (!decided.ok()) return met(decided.status());
    if (!spec.mutable_engine()->mutable_parallel()->ParseFromString(*decided)) {
      return met(absl::InternalError("rank 0 has published no layout"));
    }
    return spec;
  }
  std::vector<RankMeasure> ranks = {*own};
  for (int rank = 1; rank < assignment.world_size(); ++rank) {
    const auto text = store.Get(KeyOf(rank), kPatience);
    if (!text.ok()) return met(Annotate(text.status(), absl::StrCat("rank ", rank)));
    ASSIGN_OR_RETURN(ranks.emplace_back(), FromText(*text));
  }
  RETURN_IF_ERROR(parallel::Mark(Even(ranks, spec), FailureDomain::kConfiguration));
  const absl::Status put = store.Put(kResultKey, split.SerializeAsString());
  if (!put.ok()) return met(put);
  summary = Summary(ranks, split);
  return spec;
}

}  // namespace muster::worker
