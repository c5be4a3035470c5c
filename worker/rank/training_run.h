// The training of one rank: from its device and data through bootstrap, restore and all steps to
// the last checkpoint.
#ifndef MUSTER_WORKER_RANK_TRAINING_RUN_H_
#define MUSTER_WORKER_RANK_TRAINING_RUN_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "base/log.h"
#include "muster/v1/rank.pb.h"
#include "worker/rank/daemon_client.h"
#include "worker/rank/failure_deadline.h"
#include "worker/rank/flight_record.h"
#include "worker/rank/profiler.h"
#include "worker/rank/progress_reporter.h"
#include "worker/rank/rank_exit.h"
#include "worker/rank/rank_metrics.h"

namespace muster::worker {

// How training ended, for the exit report.
struct Ending {
  v1::Cause cause = v1::CAUSE_UNKNOWN;
  std::string message;
  int code = kExitFailed;                  // an ExitCode
  std::optional<int> peer = std::nullopt;  // the rank that could not be reached
};

// What the training of a rank uses of the process around it. All must outlive Train.
struct TrainingContext {
  DaemonClient& client;
  ProgressReporter& reporter;
  RankMetrics& metrics;
  Profiler& profiler;
  const FlightRecord& flight;
  FailureDeadline& deadline;
  Logger& logger;
};

// Trains until the last step or a wish to stop; the cause is then completed or preempted. Any
// failure is a status, marked with a FailureDomain, from which CauseOf (failure_cause.h) reads the
// cause. Blocks; for the main thread.
absl::StatusOr<Ending> Train(const v1::RankAssignment& assignment, const TrainingContext& context);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_TRAINING_RUN_H_
