// How long jobs have run, and when they are expected to end.
#ifndef MUSTER_COORDINATOR_CORE_RUN_CLOCK_H_
#define MUSTER_COORDINATOR_CORE_RUN_CLOCK_H_

#include <optional>

#include "coordinator/core/deadlines.h"
#include "coordinator/core/job_entry.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/stop_reason.h"
#include "coordinator/core/turn.h"

namespace muster::coordinator {

// The running time of a job counts if and only if its ranks may run: StateRow.running_since and
// ran. A job with a time_limit has a deadline by then. Thread: the core's. What it is made of
// outlives it.
class RunClock {
 public:
  RunClock(Scheduling& scheduling, Deadlines& deadlines)
      : scheduling_(scheduling), deadlines_(deadlines) {}

  // Running time begins to count, and stops.
  void Start(JobEntry& job, Turn& turn);
  void Stop(JobEntry& job, Turn& turn);
  // After a restart: the deadline is due.
  void Resume(JobEntry& job, Turn& turn);
  // Why a job stops that has run for its time_limit, or sets the deadline of one that has not.
  std::optional<StopReason> CheckLimit(const JobEntry& job, Turn& turn);
  // Takes down when the job is expected to end, if that has changed by more than reports differ.
  void ExpectEnd(JobEntry& job, Turn& turn);

 private:
  Scheduling& scheduling_;
  Deadlines& deadlines_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_RUN_CLOCK_H_
