// Placement as a pure function: the live loop, `muster plan`, `explain`, replay and the simulator
// call the same one.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_
#define MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

struct SlotView {
  std::string device;  // "cpu:0"
  v1::DeviceKind kind = v1::DEVICE_KIND_CPU;
  bool free = false;
  std::string held_by = {};  // name of the job that holds it; for explanations only
};
struct WorkerView {
  WorkerId id;
  bool ready = false;               // others take no new ranks
  std::string unready_reason = {};  // "is unreachable"; for explanations only
  std::vector<SlotView> slots;      // in device order
};
struct ClusterView {
  std::vector<WorkerView> workers;  // ordered by id
};
struct SchedulePolicy {
  // Strict: a job that does not fit holds back everything behind it in its queue, so that large
  // gangs do not starve. A job that waits for the end of its back-off, or that could not even start
  // on the whole cluster, idle, holds back nothing.
  bool strict_fifo = true;
  // Of the jobs behind one that does not fit so many are looked at and explained one by one; what
  // is further back costs nothing.
  int explained_behind = 32;
};

struct Decision {
  JobId job;
  std::vector<v1::Placement> placements;  // rank 0..ranks-1, dense
};
struct Explanation {
  JobId job;
  std::string text;  // why it waits, with numbers, and the cheapest change that would start it
};
// How far back a plan looked. While it stands, a job beyond that joins or leaves without changing
// anything, and waits as BehindText() says.
struct Horizons {
  // The last job looked at in a queue that is held back.
  std::map<std::string, QueueOrder> queues;
  // The last job looked at of a shape that does not fit and holds nobody back.
  std::map<std::pair<std::string, GangShape>, QueueOrder> shapes;

  bool Hide(const WaitingJob& job) const;
};
struct Schedule {
  std::vector<Decision> decisions;        // in the order to carry out
  std::vector<Explanation> explanations;  // one per job that was looked at and stays
  Horizons horizons;
  absl::Time wake_at = absl::InfiniteFuture();  // earliest back-off that ends
};

// FIFO by (priority descending, submit_sequence); all-or-nothing gangs; a gang takes the fewest
// workers that can hold it, chosen one by one: the one with the fewest free slots with which the
// gang still fits on that many (best fit, so the slots left over stay together). Slots are taken by
// whole tensor groups (WaitingJob::group), which never span workers unless no worker of the cluster
// is as large as one. Ranks take slots worker by worker in order of id, then in device order,
// tensor group by tensor group. Pure: equal inputs give equal outputs. Thread: any. O(slots +
// queues x shapes + jobs looked at + jobs placed x workers x log workers), where the jobs looked at
// are those that start or back off, and per queue and shape those that do not fit with
// `explained_behind` behind each.
Schedule Plan(const ClusterView& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now);

// Why a job behind a horizon waits.
std::string BehindText(const std::string& queue, const SchedulePolicy& policy);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_
