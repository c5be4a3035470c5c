#include "worker/rank/plan_tool.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "parallel/model/tensor_parallel.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/plan_advice.h"

namespace muster::worker {
namespace {

using nlohmann::ordered_json;

ordered_json Categories(const std::vector<parallel::MemoryUse::Category>& categories) {
  ordered_json object = ordered_json::object();
  for (const auto& [name, bytes] : categories) object[name] = bytes;
  return object;
}

ordered_json Describe(const parallel::StepVolume& sent) {
  return {{"pipeline", sent.pipeline},    {"context", sent.context},
          {"tensor", sent.tensor},        {"keys", sent.keys},
          {"gradients", sent.gradients},  {"replicas", sent.replicas},
          {"parameters", sent.parameters}};
}

ordered_json Describe(const RankPlan& rank, kernels::DeviceKind device) {
  return {{"pipeline", rank.pipeline},
          {"tensor", rank.tensor},
          {"firstRank", rank.first_rank},
          {"ranks", rank.ranks},
          {"blocks", rank.blocks},
          {"embedding", rank.embedding},
          {"head", rank.head},
          {"parameters", rank.parameters},
          {"wholeParameters",
           {{"tables", rank.whole.tables}, {"keys", rank.whole.keys}, {"small", rank.whole.small}}},
          {"neededBytes", NeededBytes(rank.memory, device)},
          {"device", Categories(rank.memory.device)},
          {"deviceBytes", rank.memory.device_bytes()},
          {"host", Categories(rank.memory.host)},
          {"hostBytes", rank.memory.host_bytes()},
          {"sent", Describe(rank.sent)},
          {"sentBytes", rank.sent.total()},
          {"tooUneven", rank.too_uneven}};
}

ordered_json Describe(const JobPlan& plan) {
  ordered_json ranks = ordered_json::array();
  for (const RankPlan& rank : plan.ranks) ranks.push_back(Describe(rank, plan.device));
  ordered_json degrees = ordered_json::object();
  for (const parallel::Axis axis : parallel::kAxes) {
    degrees[std::string(parallel::Name(axis))] = plan.degrees[axis];
  }
  return {{"device", plan.device == kernels::DeviceKind::kCuda ? "cuda" : "cpu"},
          {"degrees", degrees},
          {"parameters", plan.parameters},
          {"flopsPerToken", plan.flops_per_token},
          {"tokensPerStep", plan.tokens_per_step},
          {"flopsPerStep",
           static_cast<double>(plan.flops_per_token) * static_cast<double>(plan.tokens_per_step)},
          {"microBatches", plan.micro_batches},
          {"bubble", plan.bubble},
          {"neededBytes", plan.needed_bytes()},
          {"imbalance", plan.imbalance()},
          {"ranks", ranks}};
}

// What each tensor rank has of the heads and columns that are not shared out evenly, by name. Rows
// of the vocabulary only by given shares: equal ones are padded to the same memory.
absl::StatusOr<ordered_json> SharesOf(const v1::JobSpec& spec) {
  const int tensor = spec.engine().parallel().tensor();
  std::map<parallel::SplitKind, std::vector<int64_t>> sizes;
  for (int rank = 0; rank < tensor; ++rank) {
    ASSIGN_OR_RETURN(const parallel::ModelParallel part,
                     PartOf(spec, parallel::PerAxis(0, 0, 0, rank)));
    const auto shard = parallel::TensorShard::Of(spec::Describe(spec.engine().model()), part);
    for (const parallel::SplitShare& share : shard.shares) {
      sizes[share.kind].push_back(share.span.size());
    }
  }
  ordered_json shares = ordered_json::object();
  for (const auto& [kind, of_ranks] : sizes) {
    const auto [least, most] = std::minmax_element(of_ranks.begin(), of_ranks.end());
    const bool padded = kind == parallel::SplitKind::kVocabulary &&
                        spec.engine().parallel().tensor_shares().empty();
    if (*least != *most && !padded) shares[parallel::Name(kind)] = of_ranks;
  }
  return shares;
}

// The settings that shape the layout besides its degrees, defaults included, as the spec names
// them.
ordered_json With(const v1::EngineSpec& engine) {
  const v1::ParallelSpec& split = engine.parallel();
  const v1::TrainingSpec& training = engine.training();
  ordered_json with = ordered_json::array();
  const auto add = [&](bool applies, const auto&... words) {
    if (applies) with.push_back(absl::StrCat(words...));
  };
  add(split.zero() > 0, "zero ", split.zero());
  add(split.zero_shards() > 0, "zero_shards ", split.zero_shards());
  add(split.pipeline() > 1, "pipeline_schedule ", spec::EnumName(split.pipeline_schedule()));
  add(split.pipeline_chunks() > 1, "pipeline_chunks ", split.pipeline_chunks());
  add(split.context() > 1 && engine.model().heads() > 0, "context_method ",
      spec::EnumName(split.context_method()));
  add(split.context() > 1 && engine.model().has_mamba(), "scan_method ",
      spec::EnumName(split.scan_method()));
  add(split.sequence(), "sequence");
  add(split.tensor() > 1, "tensor_overlap ", spec::EnumName(split.tensor_overlap()));
  add(training.recompute() != v1::RECOMPUTE_NONE, "recompute ",
      spec::EnumName(training.recompute()));
  add(training.recompute_blocks() > 0, "recompute_blocks ", training.recompute_blocks());
  add(training.recompute_rest() == v1::RECOMPUTE_SELECTIVE, "recompute_rest ",
      spec::EnumName(training.recompute_rest()));
  add(split.offload().optimizer() > 0, "offload.optimizer ", split.offload().optimizer());
  add(split.offload().activations(), "offload.activations");
  return with;
}

}  // namespace

absl::Status RunPlan(const PlanArguments& arguments) {
  ASSIGN_OR_RETURN(const std::string bytes, PosixFileSystem()->Read(arguments.spec));
  v1::JobSpec spec;
  if (!spec.ParseFromString(bytes)) {
    return absl::InvalidArgumentError(arguments.spec + " holds no job spec");
  }
  spec::ApplyDefaults(spec);
  RETURN_IF_ERROR(spec::Validate(spec));
  ASSIGN_OR_RETURN(const JobPlan plan, PlanJob(spec));
  ordered_json object = Describe(plan);
  object["with"] = With(spec.engine());
  ASSIGN_OR_RETURN(ordered_json shares, SharesOf(spec));
  if (!shares.empty()) object["shares"] = std::move(shares);
  if (const std::vector<std::string> warnings = KernelWarnings(spec); !warnings.empty()) {
    object["warnings"] = warnings;
  }
  if (const std::optional<PlannedChange> even = EvenMemory(spec, plan); even.has_value()) {
    object["even"] = {{"advice", EvenText(*even)},
                      {"settings", even->settings},
                      {"neededBytes", even->plan.needed_bytes()},
                      {"imbalance", even->plan.imbalance()},
                      {"slowdown", even->slowdown}};
  }
  if (arguments.device_memory > 0) {
    // What a rank may take of a device that it shares.
    const int32_t share = spec::ShareOf(spec.resources());
    const bool shared = plan.device == kernels::DeviceKind::kCuda && share < spec::kWholeDevice;
    const int64_t memory =
        shared ? arguments.device_memory / spec::kWholeDevice * share : arguments.device_memory;
    const bool fits = plan.needed_bytes() <= memory;
    object["deviceMemoryBytes"] = memory;
    object["fits"] = fits;
    if (!fits) {
      const std::optional<PlannedChange> change = CheapestFit(spec, memory);
      object["advice"] = AdviceText(change);
      object["settings"] =
          change.has_value() ? ordered_json(change->settings) : ordered_json(ordered_json::array());
      if (change.has_value()) object["changed"] = Describe(change->plan);
    }
  }
  std::printf("%s\n", object.dump(2).c_str());
  return absl::OkStatus();
}

}  // namespace muster::worker
