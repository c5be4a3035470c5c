// Which running jobs are stopped so that one that waits can start.
#ifndef MUSTER_COORDINATOR_SCHEDULER_PREEMPTION_H_
#define MUSTER_COORDINATOR_SCHEDULER_PREEMPTION_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/running_jobs.h"
#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/waiting_queue.h"

namespace muster::coordinator {

struct Slot {
  WorkerId worker;
  std::string device;

  friend bool operator<(const Slot& a, const Slot& b) {
    return a.worker != b.worker ? a.worker < b.worker : a.device < b.device;
  }
  friend bool operator==(const Slot&, const Slot&) = default;
};

// Slots that are kept for a job that waits, until it starts. In the index of slots the job holds
// those that are free; the others are still held by jobs that are being stopped. Where it is to
// share them, or others share them still, it has its part of them from the start
// (SlotView::KeepsAtOnce).
struct Kept {
  std::string queue;
  int32_t priority = 0;
  v1::DeviceKind device = v1::DEVICE_KIND_CPU;
  std::string tenant;
  std::set<Slot> slots;
  int32_t share = spec::kWholeDevice;  // thousandths of each

  friend bool operator==(const Kept&, const Kept&) = default;
};
using KeptSlots = std::map<JobId, Kept>;  // by the job for which they are kept

// A running job that stops to go on with as many ranks as it has slots here.
struct Resized {
  JobId job;
  std::vector<Slot> slots;  // to keep for it, by rank
};

// What it takes to start a job.
struct Eviction {
  std::vector<Resized> resized;  // running jobs that shrink, in order of id
  std::vector<JobId> stopped;    // running jobs to stop, in order of id
  std::vector<JobId> outbid;     // jobs that wait and lose the slots kept for them, in order of id
  std::vector<Slot> slots;       // to keep for the job, by rank
};

struct EvictionSearch {
  SlotIndex& slots;  // changed during the search, and left as it was
  const RunningJobs& running;
  const KeptSlots& kept;
  const std::set<JobId>& stopped;  // jobs that the same plan stops already
  const QueueTree& tree;
  const QueueUse& use;  // of running jobs and of those that slots are kept for
  const QueueHistory& history;
  const QueueUse& past;  // what queues have used since `history` was told of their use
  absl::Time now;
};

// The smallest cost at which the job gets slots for its whole gang, within the limits of its queue.
// Each after its min_runtime, jobs are stopped that have a smaller priority in its queue; and
// whatever their priority, jobs of queues that use more than is guaranteed to them, while its own
// queue with the job does not (both as seen from where the paths of the two queues part). A job
// costs, in device-seconds, its work since its last checkpoint and a restart (kRestartCost), times
// its devices. What its queue uses beyond its fair share (DebtOf) counts against it: a device that
// is not beyond it costs kFairnessCost more, compared with the candidates' queue that has the
// greatest part of its devices beyond its own. None is stopped in vain: if one of them were left
// alone, the gang would not fit. Tried are: the cheapest jobs of the cluster; those that share the
// cheapest workers; and for a few domains, those that promise most, the jobs in one domain that
// could hold the gang: of the level that it requires, else of the narrowest level that has such a
// domain. Of choices that cost as much, the one that leaves the better placement. Before any of
// them is stopped the elastic ones among them shrink, each to one of its sizes: none further than
// needed, so that with its next larger size the gang would not fit. Slots that are being released
// anyway come first, and if they are enough nothing is to be done: no value, as when the gang does
// not fit in any way. `retry_at` is set to the time at which another candidate's min_runtime is
// over, if that is earlier. Pure. O(candidates x (slots of each + one placement + sizes x (1 +
// elastic candidates) placements)); O(1) where candidates have too few slots.
std::optional<Eviction> ChooseVictims(const EvictionSearch& search, const WaitingJob& job,
                                      absl::Time& retry_at);
constexpr absl::Duration kRestartCost = absl::Minutes(1);
constexpr absl::Duration kFairnessCost = absl::Minutes(10);
constexpr size_t kDomainsTriedMax = 4;

// Whether the slots kept for a job are still to be had: what others take of each leaves room for
// it, but for jobs that are being stopped.
bool StillKept(const EvictionSearch& search, const JobId& job, const Kept& kept);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_PREEMPTION_H_
