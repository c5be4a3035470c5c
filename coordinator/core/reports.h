// What daemons report that they hold (Observed).
#ifndef MUSTER_COORDINATOR_CORE_REPORTS_H_
#define MUSTER_COORDINATOR_CORE_REPORTS_H_

#include <cstdint>

#include "coordinator/core/attempts.h"
#include "coordinator/core/core.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "muster/v1/session.pb.h"

namespace muster::coordinator {

// Compares a report with what the worker should hold: what concerns a current attempt goes there,
// and other processes keep the worker's slots from being free until they are gone. Nothing else
// adds to WorkerEntry.observed, stale_attempts and foreign_attempts. Thread: the core's. What it is
// made of outlives it.
class Reports {
 public:
  Reports(const CoreConfig& config, JobTable& jobs, WorkerTable& workers, Attempts& attempts)
      : config_(config), jobs_(jobs), workers_(workers), attempts_(attempts) {}

  // `hello`: it is that of the Hello of a session, which lists everything.
  void Apply(WorkerEntry& worker, const v1::Observed& observed, bool hello, Turn& turn);

 private:
  void RaiseEpochFloor(const WorkerEntry& worker, const JobId& id, uint64_t epoch, Turn& turn);

  const CoreConfig& config_;
  JobTable& jobs_;
  WorkerTable& workers_;
  Attempts& attempts_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_REPORTS_H_
