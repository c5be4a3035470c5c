// What the trainer reports, passed on: to the daemon (progress, commits, notices), to the rank's
// metrics, and as lines for people on stdout, which are the rank's log.
#ifndef MUSTER_WORKER_RANK_PROGRESS_REPORTER_H_
#define MUSTER_WORKER_RANK_PROGRESS_REPORTER_H_

#include <cstdint>
#include <deque>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/log.h"
#include "kernels/device/device.h"
#include "kernels/device/trace.h"
#include "muster/v1/rank.pb.h"
#include "parallel/train/trainer.h"
#include "worker/rank/arithmetic.h"
#include "worker/rank/daemon_client.h"
#include "worker/rank/profiler.h"
#include "worker/rank/rank_exit.h"
#include "worker/rank/rank_metrics.h"

namespace muster::worker {

// Writes `line` to stdout at once.
void PrintLine(const std::string& line);

// Where reports go. All must outlive the reporter.
struct ProgressSinks {
  DaemonClient& client;
  ExitReporter& exit;
  RankMetrics& metrics;
  Profiler& profiler;
  Logger& logger;
};

// For the training thread alone. It never waits for the daemon.
class ProgressReporter : public parallel::TrainerHooks {
 public:
  // `metrics_address` is where this rank serves its metrics, or empty. The assignment and the
  // signals must outlive the reporter.
  ProgressReporter(const v1::RankAssignment& assignment, StopSignals& signals,
                   const ProgressSinks& sinks, const std::string& metrics_address);

  // From the first step on, reports have the utilisation of the devices' arithmetic.
  void SetArithmetic(const Arithmetic& arithmetic) { arithmetic_ = arithmetic; }
  // From now on reports have the memory that has been taken of `device`, which must outlive the
  // last call of a hook.
  void SetDevice(kernels::Device& device) { device_ = &device; }
  // GEMMs are being timed in the middle of a step, which takes that much longer.
  void OnMeasuring();
  // The job goes on behind this step.
  void OnRestored(int64_t step, int64_t consumed_samples);

  // TrainerHooks
  void OnPhase(absl::string_view phase) override;
  void OnProgress(absl::string_view phase, double fraction) override;
  kernels::Trace* BeginStep(int64_t step) override;
  void OnStep(const parallel::StepReport& report) override;
  void OnEvaluation(const parallel::EvaluationReport& report) override;
  void OnSaved(const parallel::SavedCheckpoint& saved) override;
  void OnDamaged(const parallel::CheckpointId& id, const absl::Status& why) override;
  void OnRemoved(const parallel::CheckpointId& id) override;
  void OnWarning(const absl::Status& status) override;
  int64_t CommittedStep() override;
  bool StopRequested() override;

 private:
  // Of the last steps: tokens trained on per second, and shares of the devices' peak.
  struct Throughput {
    double tokens_per_second = 0;
    double model_flops_utilization = 0;
    double hardware_flops_utilization = 0;
  };
  Throughput AddToThroughput(const parallel::StepReport& report);
  void SetStep(const parallel::StepReport& report, const Throughput& throughput);
  void SetTimes(const parallel::StepReport& report);
  void SetMemory();
  void AddLossPoint(const parallel::StepReport& report);
  void PrintStep(const parallel::StepReport& report, const Throughput& throughput);
  void Publish(bool now);

  const v1::RankAssignment& assignment_;
  StopSignals& signals_;
  const ProgressSinks sinks_;
  kernels::Device* device_ = nullptr;
  Arithmetic arithmetic_;
  v1::RankProgress progress_;
  std::deque<absl::Time> loss_times_;              // when each of progress_.losses() was added
  std::deque<std::pair<int64_t, double>> recent_;  // tokens and seconds of the last steps
  bool first_step_ = true;
  bool measured_ = false;  // OnMeasuring has been called
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_PROGRESS_REPORTER_H_
