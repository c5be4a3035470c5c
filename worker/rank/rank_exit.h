// How a rank process ends: its exit codes, its exit report, and the signals that ask it to end.
#ifndef MUSTER_WORKER_RANK_RANK_EXIT_H_
#define MUSTER_WORKER_RANK_RANK_EXIT_H_

#include <signal.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "muster/v1/rank.pb.h"

namespace muster::worker {

// Exit codes of `muster-rank --assignment`.
enum ExitCode {
  kExitCompleted = 0,  // trained all steps
  kExitFailed = 1,     // exit.pb has the cause
  kExitUsage = 2,      // bad arguments, or the assignment cannot be read
  kExitStopped = 3,    // asked to (SIGTERM, or its daemon), or the attempt is over
};

// Writes exit.pb (v1::RankExitReport) into the run directory, once, whichever thread comes first.
// Thread-safe.
class ExitReporter {
 public:
  // An empty run directory: no report is written.
  explicit ExitReporter(std::string run_directory) : run_directory_(std::move(run_directory)) {}

  // The progress that the report will have.
  void SetProgress(const v1::RankProgress& progress) ABSL_LOCKS_EXCLUDED(mutex_);

  // `peer` is the rank that could not be reached, if that is the cause. A report that cannot be
  // written is a line on stderr. Only the first call writes.
  void Write(v1::Cause cause, const std::string& message, std::optional<int> peer = std::nullopt)
      ABSL_LOCKS_EXCLUDED(mutex_);

  // Write, then end the process with `code`, without running destructors.
  [[noreturn]] void EndProcess(v1::Cause cause, const std::string& message, int code,
                               std::optional<int> peer = std::nullopt);

 private:
  const std::string run_directory_;
  Mutex mutex_;
  bool written_ ABSL_GUARDED_BY(mutex_) = false;
  v1::RankProgress progress_ ABSL_GUARDED_BY(mutex_);
};

// Handles SIGTERM and SIGINT on a thread of its own. While the rank trains, the first of them asks
// for a stop at the next step boundary and the second ends the process; at other times, when no
// step boundary will come, the first one ends it. Methods are thread-safe.
class StopSignals {
 public:
  // Blocks both signals in this thread and in those that it starts later, so it must be made before
  // any other thread exists. `exit` must outlive it.
  explicit StopSignals(ExitReporter& exit);
  ~StopSignals();

  bool stop_requested() const { return stop_; }
  void TrainingStarts() { training_ = true; }
  void TrainingEnds() { training_ = false; }

 private:
  void Run();

  ExitReporter& exit_;
  sigset_t signals_;
  std::atomic<bool> ending_ = false;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> training_ = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_RANK_EXIT_H_
