// At the end of a turn: rows of jobs that changed become durable, and watchers see the jobs.
#ifndef MUSTER_COORDINATOR_CORE_JOB_PUBLISHER_H_
#define MUSTER_COORDINATOR_CORE_JOB_PUBLISHER_H_

#include <set>

#include "base/ids.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/device_accounts.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/turn.h"

namespace muster::coordinator {

// A job whose progress alone has changed becomes durable a little later, and a large gang is seen a
// little later, by a deadline. Thread: the core's. What it is made of outlives it.
class JobPublisher {
 public:
  JobPublisher(JobTable& jobs, Deadlines& deadlines, DeviceAccounts& accounts)
      : jobs_(jobs), deadlines_(deadlines), accounts_(accounts) {}

  // Of the jobs that the turn names.
  void Persist(Turn& turn);
  // The deadline has passed: adds the jobs that were to be seen later to those that the turn names.
  void PublishLate(Turn& turn);

 private:
  void Publish(JobEntry& job, Turn& turn);

  JobTable& jobs_;
  Deadlines& deadlines_;
  DeviceAccounts& accounts_;
  std::set<JobId> unpublished_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOB_PUBLISHER_H_
