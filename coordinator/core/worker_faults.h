// What attempts say of the workers that they run on.
#ifndef MUSTER_COORDINATOR_CORE_WORKER_FAULTS_H_
#define MUSTER_COORDINATOR_CORE_WORKER_FAULTS_H_

#include "coordinator/core/deadlines.h"
#include "coordinator/core/job_entry.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/stop_reason.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

// Decides which workers have a fault by what happened to an attempt, and notes it in their
// reputation (reputation.h). Thread: the core's. What it is made of outlives it.
class WorkerFaults {
 public:
  WorkerFaults(WorkerTable& workers, const Scheduling& scheduling, Deadlines& deadlines)
      : workers_(workers), scheduling_(scheduling), deadlines_(deadlines) {}

  // Of the end of an attempt, or of a worker's part in it. StateRow.between is up to date.
  void NoteEnd(const JobEntry& job, const StopReason& reason, Turn& turn);
  // Requires: the job is up.
  void NoteSlowRanks(JobEntry& job, Turn& turn);

 private:
  WorkerTable& workers_;
  const Scheduling& scheduling_;
  Deadlines& deadlines_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_WORKER_FAULTS_H_
