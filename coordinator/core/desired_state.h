// What each daemon should hold (Desired).
#ifndef MUSTER_COORDINATOR_CORE_DESIRED_STATE_H_
#define MUSTER_COORDINATOR_CORE_DESIRED_STATE_H_

#include <cstddef>
#include <map>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/core/core.h"
#include "coordinator/core/desired_list.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "muster/v1/session.pb.h"

namespace muster::coordinator {

// A function of the tables but for what the session's daemon was told, WorkerEntry.desired and
// specs_wait. Specs are sent once, and as many of them together as one
// message may have. Thread: the core's. What it is made of outlives it.
class DesiredState {
 public:
  DesiredState(const CoreConfig& config, const JobTable& jobs) : config_(config), jobs_(jobs) {}

  // Sends what the worker should hold when that has changed, or seems lost. Requires: it has a
  // session.
  void Send(WorkerEntry& worker, Turn& turn);

 private:
  absl::Duration StopGraceOf(const JobEntry& job) const;
  DesiredList::Attempt WantedOf(const WorkerEntry& worker, const JobEntry& job) const;
  // All that it should hold, with as many of the specs that it needs as one Desired may have.
  // Attempts without which it can do nothing yet are left out.
  std::map<JobId, DesiredList::Attempt> WantedOf(WorkerEntry& worker) const;
  static bool NeedsSpec(const WorkerEntry& worker, const JobEntry& job,
                        const DesiredList::Attempt& wanted);
  // Of the job's spec and checkpoints in a Desired of the worker.
  static size_t SpecBytes(const WorkerEntry& worker, const JobEntry& job);
  static v1::DesiredAttempt DesiredOf(const WorkerEntry& worker, const JobEntry& job,
                                      const DesiredList::Attempt& wanted);

  const CoreConfig& config_;
  const JobTable& jobs_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DESIRED_STATE_H_
