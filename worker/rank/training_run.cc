#include "worker/rank/training_run.h"

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/train/failure.h"
#include "parallel/train/trainer.h"
#include "worker/rank/arithmetic.h"
#include "worker/rank/balance.h"
#include "worker/rank/engine_setup.h"
#include "worker/rank/engine_spec.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/rendezvous.h"

namespace muster::worker {
namespace {

// How long to wait for the verdict on the last checkpoint, without which older ones cannot be
// pruned.
constexpr absl::Duration kVerdictTimeout = absl::Seconds(15);

// Seconds since it was made.
class Timer {
 public:
  double seconds() const { return absl::ToDoubleSeconds(clock_.Monotonic() - begin_); }

 private:
  const RealClock clock_{};
  const absl::Duration begin_ = clock_.Monotonic();
};

// The assignment with a spec whose layout fits the measured speed of the devices, where the spec
// asks for that.
absl::StatusOr<v1::RankAssignment> Balanced(const v1::RankAssignment& given,
                                            const TrainingContext& context) {
  context.reporter.OnPhase(Balances(given.spec()) ? "balancing" : "starting");
  v1::RankAssignment assignment = given;
  std::string summary;
  ASSIGN_OR_RETURN(*assignment.mutable_spec(), BalancedSpec(given, context.client, summary));
  if (!summary.empty()) PrintLine(summary);
  return assignment;
}

// The daemon makes the cache directory when it starts; someone may have removed it since.
void MakeCacheDirectory(const v1::RankAssignment& assignment, FileSystem& files,
                        ProgressReporter& reporter) {
  const std::string& cache = assignment.cache_directory();
  if (cache.empty()) return;
  const absl::Status made = files.MakeDirectory(cache);
  if (!made.ok()) {
    reporter.OnWarning(Annotate(made, "what ranks measure is not kept for later ones"));
  }
}

void PrintMemory(const EngineSetup& setup) {
  const bool cuda = setup.device->kind() == kernels::DeviceKind::kCuda;
  PrintLine(absl::StrCat(
      "taking ",
      cuda ? absl::StrCat(BytesText(setup.memory.device_bytes()), " of ", setup.device->name(),
                          " and ", BytesText(setup.memory.host_bytes()), " of the host's memory")
           : absl::StrCat(BytesText(NeededBytes(setup.memory, setup.device->kind())),
                          " of memory")));
}

void PrintJob(const v1::RankAssignment& assignment, const EngineSetup& setup,
              const parallel::Trainer& trainer, const Arithmetic& arithmetic) {
  PrintLine(absl::StrFormat(
      "job %s epoch %d: %s with %.2f M parameters, %d ranks on %s, %.1f MB of state and %.1f MB "
      "of activations per rank, %.1f MB of state offloaded",
      assignment.job_id(), assignment.epoch(), setup.model->description().family,
      static_cast<double>(setup.model->parameters().elements()) * 1e-6, assignment.world_size(),
      setup.device->name(), static_cast<double>(trainer.state_bytes()) * 1e-6,
      static_cast<double>(trainer.arena().peak_bytes()) * 1e-6,
      static_cast<double>(trainer.host_state_bytes()) * 1e-6));
  PrintLine(arithmetic.ToText());
  for (const std::string& warning : KernelWarnings(assignment.spec())) PrintLine(warning);
}

// Restores the newest checkpoint that is whole; without one, loads the initial weights of the spec,
// if it names any.
absl::Status LoadState(const v1::RankAssignment& assignment, const EngineSetup& setup,
                       const TrainingContext& context, parallel::Trainer& trainer) {
  std::vector<parallel::RestoreCandidate> candidates;
  for (const v1::CheckpointRecord& record : assignment.restore()) {
    candidates.push_back({{JobId(assignment.job_id()), record.step(), Epoch(record.epoch()),
                           std::max<uint32_t>(1, record.membership())},
                          record.path(),
                          record.manifest_checksum()});
  }
  const Timer restoring;
  RETURN_IF_ERROR(trainer.Restore(candidates));
  if (trainer.step() > 0) {
    context.metrics.Restored(restoring.seconds());
    context.reporter.OnRestored(trainer.step(), trainer.consumed_samples());
    PrintLine(absl::StrFormat("restored step %d", trainer.step()));
    return absl::OkStatus();
  }
  if (setup.initial_weights == nullptr) return absl::OkStatus();
  context.reporter.OnPhase("loading");
  RETURN_IF_ERROR(
      trainer.Initialize([&](const std::string& name, const parallel::Box& box, float* out) {
        return setup.initial_weights->Read(name, box, out);
      }));
  if (assignment.rank() == 0) {
    PrintLine(absl::StrCat("began with the weights of ", setup.initial_weights->source()));
  }
  return absl::OkStatus();
}

absl::StatusOr<Ending> RunSteps(const v1::RankAssignment& assignment, DaemonClient& client,
                                parallel::Trainer& trainer) {
  ASSIGN_OR_RETURN(const parallel::Trainer::Outcome outcome, trainer.Run());
  if (trainer.LeadsDirectory() && assignment.spec().has_checkpoint()) {
    // Without a verdict in time the daemon goes on asking for it; only older checkpoints remain.
    client.WaitCommitted(trainer.step(), kVerdictTimeout).IgnoreError();
    trainer.Prune();
  }
  if (outcome == parallel::Trainer::Outcome::kStopped) {
    return Ending{v1::CAUSE_PREEMPTED,
                  absl::StrFormat("asked to stop, ended after step %d", trainer.step()),
                  kExitStopped};
  }
  return Ending{v1::CAUSE_COMPLETED, absl::StrFormat("trained %d steps", trainer.step()),
                kExitCompleted};
}

}  // namespace

absl::StatusOr<Ending> Train(const v1::RankAssignment& given, const TrainingContext& context) {
  ProgressReporter& reporter = context.reporter;
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  ASSIGN_OR_RETURN(const v1::RankAssignment assignment, Balanced(given, context));
  MakeCacheDirectory(assignment, *files, reporter);
  const Timer starting;
  ASSIGN_OR_RETURN(EngineSetup setup, SetUpEngine(assignment, *files, /*memory=*/std::nullopt,
                                                  [&reporter] { reporter.OnMeasuring(); }));
  context.profiler.SetDevice(setup.device->kind());
  const Arithmetic arithmetic =
      Arithmetic::Of(*setup.model, setup.device->name(), setup.options.precision,
                     assignment.spec().engine().training().precision() == v1::PRECISION_TF32,
                     assignment.world_size());
  reporter.SetArithmetic(arithmetic);
  const double opened = starting.seconds();

  reporter.OnPhase("bootstrapping");
  ASSIGN_OR_RETURN(const auto communicator,
                   ConnectRanks(assignment, context.client, *setup.device, context.flight,
                                context.deadline, context.logger));
  RETURN_IF_ERROR(CheckRanks(assignment, *communicator, *files, setup));
  const double connected = starting.seconds();
  const auto groups = parallel::MeshGroups::Make(*setup.mesh, *communicator, setup.zero_shards);
  if (!groups.ok()) {
    return parallel::Mark(Annotate(groups.status(), "communicators of the mesh"),
                          parallel::FailureDomain::kCommunication);
  }
  if (assignment.world_size() > 1) {
    PrintLine(absl::StrFormat(
        "opened %s and the data in %.1f s, connected to the other ranks in %.1f s, made groups in "
        "%.1f s",
        setup.device->name(), opened, connected - opened, starting.seconds() - connected));
  }

  reporter.OnPhase("allocating");
  PrintMemory(setup);
  const Timer allocating;
  ASSIGN_OR_RETURN(
      const auto trainer,
      parallel::Trainer::Make(setup.options, *setup.model, *setup.device, **groups, *setup.training,
                              setup.validation.get(), *files, reporter));
  reporter.SetDevice(*setup.device);
  PrintLine(absl::StrFormat("took them in %.1f s", allocating.seconds()));
  if (assignment.rank() == 0) PrintJob(assignment, setup, *trainer, arithmetic);
  RETURN_IF_ERROR(LoadState(assignment, setup, context, *trainer));
  return RunSteps(assignment, context.client, *trainer);
}

}  // namespace muster::worker
