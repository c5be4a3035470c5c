#include "tests/gpu/engine_run.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "kernels/device/device_trace.h"
#include "kernels/device/trace.h"
#include "nlohmann/json.hpp"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/train/memory.h"
#include "proto/spec/spec.h"
#include "worker/rank/engine_setup.h"

namespace muster::testing {
namespace {

using parallel::StepReport;

class Recorder : public parallel::TrainerHooks {
 public:
  // Traces the last step but one, if `trace` is not empty.
  Recorder(EngineResult& result, int64_t steps, std::string trace, int rank)
      : result_(result),
        traced_(trace.empty() ? -1 : steps - 1),
        rank_(rank),
        path_(std::move(trace)) {}
  kernels::Trace* BeginStep(int64_t step) override {
    if (step != traced_) return nullptr;
    trace_ = std::make_shared<kernels::Trace>();
    auto started = kernels::DeviceTrace::Start(trace_);
    CHECK_OK(started.status());
    device_trace_ = *std::move(started);
    return trace_.get();
  }
  void OnStep(const StepReport& report) override {
    if (report.step == traced_) {
      device_trace_.reset();
      CHECK_OK(
          PosixFileSystem()->WriteAtomically(absl::StrCat(path_, "-", rank_, ".json"),
                                             trace_->ToJson(rank_, absl::StrCat("rank ", rank_))));
    }
    result_.losses.push_back(report.loss);
    result_.norms.push_back(report.gradient_norm);
    result_.seconds.push_back(report.seconds);
    std::vector<double>& exposed = result_.exposed.emplace_back();
    for (int kind = 0; kind < parallel::kExposures; ++kind) {
      exposed.push_back(report.exposed.of(static_cast<parallel::Exposure>(kind)));
    }
  }
  void OnSaved(const parallel::SavedCheckpoint& saved) override {
    result_.last_checkpoint = saved.result.directory;
  }

 private:
  EngineResult& result_;
  const int64_t traced_;  // -1: none
  const int rank_;
  const std::string path_;
  std::shared_ptr<kernels::Trace> trace_;
  std::unique_ptr<kernels::DeviceTrace> device_trace_;
};

// Adds `times` times what the groups have sent so far to EngineResult::sent and by_copy_engines.
void Count(parallel::MeshGroups& groups, int times, EngineResult& result) {
  const std::vector<std::vector<parallel::Communicator*>> senders = {
      {&groups.shard(), &groups.replicate()},
      {&groups.gather()},
      {&groups.Along({parallel::Axis::kTensor})},
      {&groups.Along({parallel::Axis::kContext})}};
  result.sent.resize(senders.size());
  result.by_copy_engines.resize(senders.size());
  for (size_t i = 0; i < senders.size(); ++i) {
    for (const parallel::Communicator* sender : senders[i]) {
      result.sent[i] += times * sender->bytes_sent();
      result.by_copy_engines[i] += times * sender->bytes_by_copy_engines();
    }
  }
}

int64_t Used(kernels::Device& device) {
  const absl::StatusOr<kernels::DeviceMemory> memory = device.Memory();
  return memory.ok() ? memory->total - memory->free : 0;
}

}  // namespace

absl::StatusOr<v1::JobSpec> EngineSpec(kernels::DeviceKind kind, const std::string& data,
                                       const std::vector<std::string>& overrides) {
  const bool cuda = kind == kernels::DeviceKind::kCuda;
  const std::string base = absl::StrCat(R"(
name: layouts
resources:
  device: )",
                                        cuda ? "cuda" : "cpu", R"(
engine:
  model: {family: gpt2}
  data: {train: [{path: ")",
                                        data, R"("}]}
  training:
    steps: 1
    precision: )",
                                        cuda ? "bf16" : "fp32", R"(
    seed: 77
    optimizer: {adamw: {lr: 1.0e-4}}
)");
  std::vector<std::string> paths = {"resources.ranks=1"};
  for (const std::string& text : overrides) paths.push_back(absl::StrCat("engine.", text));
  ASSIGN_OR_RETURN(v1::JobSpec spec, spec::Parse(base, "layouts.yaml", paths));
  if (!spec.engine().model().preset().empty()) {
    spec.mutable_engine()->mutable_model()->clear_family();
  }
  spec.set_working_directory("/");
  spec::ApplyDefaults(spec);
  const v1::ParallelSpec& split = spec.engine().parallel();
  const auto degree = [](int value) { return std::max(1, value); };
  spec.mutable_resources()->set_ranks(degree(split.data()) * degree(split.tensor()) *
                                      degree(split.context()) * degree(split.pipeline()));
  RETURN_IF_ERROR(spec::Validate(spec));
  return spec;
}

std::string EngineResult::ToText() const {
  const nlohmann::json json = {{"losses", losses},
                               {"norms", norms},
                               {"seconds", seconds},
                               {"exposed", exposed},
                               {"sent", sent},
                               {"by_copy_engines", by_copy_engines},
                               {"used_before", used_before},
                               {"used_by_groups", used_by_groups},
                               {"used", used},
                               {"allocated", allocated},
                               {"predicted", predicted},
                               {"predicted_libraries", predicted_libraries},
                               {"flops_per_token", flops_per_token},
                               {"startup_seconds", startup_seconds},
                               {"last_checkpoint", last_checkpoint}};
  return json.dump();
}

absl::StatusOr<EngineResult> EngineResult::FromText(const std::string& text) {
  const nlohmann::json json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) return absl::InternalError(absl::StrCat("not a result: ", text));
  EngineResult result;
  result.losses = json.value("losses", std::vector<double>());
  result.norms = json.value("norms", std::vector<double>());
  result.seconds = json.value("seconds", std::vector<double>());
  result.exposed = json.value("exposed", std::vector<std::vector<double>>());
  result.sent = json.value("sent", std::vector<int64_t>());
  result.by_copy_engines = json.value("by_copy_engines", std::vector<int64_t>());
  result.used_before = json.value("used_before", int64_t{0});
  result.used_by_groups = json.value("used_by_groups", int64_t{0});
  result.used = json.value("used", int64_t{0});
  result.allocated = json.value("allocated", int64_t{0});
  result.predicted = json.value("predicted", int64_t{0});
  result.predicted_libraries = json.value("predicted_libraries", int64_t{0});
  result.flops_per_token = json.value("flops_per_token", 0.0);
  result.startup_seconds = json.value("startup_seconds", 0.0);
  result.last_checkpoint = json.value("last_checkpoint", std::string());
  return result;
}

absl::StatusOr<EngineResult> RunEngine(RankProcess& self, const EngineRun& run) {
  const auto start = std::chrono::steady_clock::now();
  v1::RankAssignment assignment;
  assignment.set_job_id("layouts");
  assignment.set_job_name("layouts");
  assignment.set_epoch(1);
  assignment.set_rank(self.rank());
  assignment.set_world_size(run.spec.resources().ranks());
  assignment.set_local_ranks(run.spec.resources().ranks());
  assignment.set_threads(run.threads);
  assignment.set_device(
      absl::StrCat(self.kind() == kernels::DeviceKind::kCuda ? "cuda:" : "cpu:", self.rank()));
  assignment.set_cache_directory(run.cache_directory);
  *assignment.mutable_spec() = run.spec;
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(worker::EngineSetup setup, worker::SetUpEngine(assignment, *files));
  if (run.adjust) run.adjust(setup.options);
  ASSIGN_OR_RETURN(parallel::Communicator* const world,
                   self.World(run.spec.resources().ranks(), run.thread_blocks_max));
  EngineResult result;
  result.used_before = Used(*setup.device);
  ASSIGN_OR_RETURN(
      const std::shared_ptr<parallel::MeshGroups> groups,
      self.Groups(*setup.mesh, setup.zero_shards, run.thread_blocks_max, run.keep_groups));
  result.used_by_groups = Used(*setup.device) - result.used_before;
  Count(*groups, -1, result);
  Recorder hooks(result, run.spec.engine().training().steps(), run.trace, self.rank());
  auto trainer = parallel::Trainer::Make(setup.options, *setup.model, *setup.device, *groups,
                                         *setup.training, nullptr, *files, hooks);
  absl::Status status = trainer.status();
  if (status.ok()) {
    result.startup_seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    status = (*trainer)->Run().status();
  }
  if (!status.ok()) {
    world->Abort(status);
    return status;
  }
  Count(*groups, 1, result);
  result.used = Used(*setup.device);
  result.allocated = setup.device->allocated_bytes();
  for (const auto& [name, bytes] : (*trainer)->PredictedMemory().device) {
    (name == "libraries" ? result.predicted_libraries : result.predicted) += bytes;
  }
  result.flops_per_token = static_cast<double>(setup.model->training_flops_per_token());
  return result;
}

absl::Status WriteTokens(const std::string& prefix, int64_t count, int64_t vocab, bool learnable,
                         int64_t document) {
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(auto writer, parallel::IndexedDatasetWriter::Create(
                                    *files, prefix, parallel::TokenTypeFor(vocab)));
  Rng rng(1);
  std::vector<int32_t> text = {1};
  while (static_cast<int64_t>(text.size()) < count) {
    const auto likely = static_cast<int32_t>((text.back() * int64_t{7} + 1) % vocab);
    const auto any = static_cast<int32_t>(rng.Below(static_cast<uint64_t>(vocab)));
    text.push_back(learnable && rng.Chance(0.8) ? likely : any);
  }
  const int64_t size = document > 0 ? document : count;
  for (int64_t begin = 0; begin < count; begin += size) {
    RETURN_IF_ERROR(writer->Append(absl::MakeConstSpan(text).subspan(begin, size)));
    RETURN_IF_ERROR(writer->EndDocument());
  }
  return writer->Finish();
}

}  // namespace muster::testing
