// Placement as a pure function of the cluster, the queue, the policy and the time.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_
#define MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

struct ClusterView {
  std::vector<WorkerView> workers;  // ordered by id
};
struct SchedulePolicy {
  // True: a job that does not fit holds back all jobs behind it in its queue, so that large gangs
  // do not starve. A job that backs off, or that would not fit on the whole cluster if it were
  // idle, holds back none.
  bool strict_fifo = true;
  // How many jobs behind one that does not fit a plan looks at and explains one by one. It does not
  // look at the jobs behind those.
  int explained_behind = 32;
};

struct Decision {
  JobId job;
  std::vector<v1::Placement> placements;  // of ranks 0 to ranks - 1, in this order
};
struct Explanation {
  JobId job;
  std::string text;  // why it waits, with numbers, and the cheapest change that would start it
};
// How far back in the queues a plan looked. A job beyond this can join or leave without changing
// the plan; BehindText() says why it waits.
struct PlanningHorizon {
  // By queue that is held back: the last job that the plan looked at.
  std::map<std::string, QueueOrder> queues;
  // By queue and shape that does not fit and holds none back: the last job that the plan looked at.
  std::map<std::pair<std::string, GangShape>, QueueOrder> shapes;

  // True: the job is beyond the horizon.
  bool Excludes(const WaitingJob& job) const;
};
struct Schedule {
  std::vector<Decision> decisions;        // in the order to carry out
  std::vector<Explanation> explanations;  // one per job that was looked at and still waits
  PlanningHorizon horizon;
  absl::Time wake_at = absl::InfiniteFuture();  // end of the back-off that ends first
};

// Places jobs in order of (priority descending, submit_sequence), each as a whole gang or not at
// all. A gang takes the fewest workers that can hold it. They are chosen one by one: always the one
// with the fewest free slots with which the gang still fits on that many workers (best fit, so that
// the slots left over stay together). Slots are taken by whole tensor groups (WaitingJob::group),
// which span workers only if no worker of the cluster is as large as one. Ranks take slots worker
// by worker in order of id, then in device order, tensor group by tensor group. Pure: equal inputs
// give equal outputs; `slots` is as before when it returns. Thread: any. O(queues x shapes + jobs
// looked at + jobs placed x (workers taken x different numbers of free slots + slots taken)), where
// the jobs looked at are those that start or back off, and for each queue and shape those that do
// not fit with `explained_behind` jobs behind each.
Schedule Plan(SlotIndex& slots, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now);
Schedule Plan(const ClusterView& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now);

// Why a job beyond the horizon waits.
std::string BehindText(const std::string& queue, const SchedulePolicy& policy);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_
