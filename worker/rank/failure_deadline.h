#ifndef MUSTER_WORKER_RANK_FAILURE_DEADLINE_H_
#define MUSTER_WORKER_RANK_FAILURE_DEADLINE_H_

#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "base/mutex.h"

namespace muster::worker {

// A bound on how long a rank takes to end once its collectives have failed. The training thread
// usually notices at once and ends the process in good order. But it may be waiting for a device
// that never comes back: its memory, its peers and the daemon must not wait with it. Thread-safe.
class FailureDeadline {
 public:
  // `expire` runs once, on a thread of this object, `grace` after Arm unless Disarm came first.
  FailureDeadline(absl::Duration grace, absl::AnyInvocable<void(const absl::Status&)> expire);
  ~FailureDeadline();  // disarms

  // Starts the grace. Only the first call counts.
  void Arm(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mutex_);
  // The training thread has come back from its device. Waits for `expire` if it is running.
  void Disarm() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  void Run() ABSL_LOCKS_EXCLUDED(mutex_);

  const absl::Duration grace_;
  absl::AnyInvocable<void(const absl::Status&)> expire_;
  Mutex mutex_;
  absl::Status why_ ABSL_GUARDED_BY(mutex_);  // not OK: armed
  bool disarmed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_FAILURE_DEADLINE_H_
