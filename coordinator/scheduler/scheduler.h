// Placement as a pure function of the cluster, the queue, the policy and the time.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_
#define MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/scheduler/preemption.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/running_jobs.h"
#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

struct SchedulePolicy {
  // True: a job that does not fit holds back all jobs behind it in its queue, so that large gangs
  // do not starve. A job that backs off, or that would not fit on the whole cluster if it were
  // idle, holds back none.
  bool strict_fifo = true;
  // How many jobs behind one that does not fit a plan looks at, whether they may start before it,
  // and explains one by one. It does not look at the jobs behind those.
  int explained_behind = 32;
  // For so many jobs that do not fit, each the first of its queue, a plan finds out when and where
  // they will start, so that jobs start before them only where that does not delay them.
  int reservations_max = 4;
};

// What a plan is about. A plan changes `slots` while it is made and leaves them as they were.
struct Snapshot {
  SlotIndex& slots;
  const RunningJobs& running;  // every job that holds a slot
  const KeptSlots& kept;       // of jobs in the queue
  const QueueTree& tree;
  const QueueUse& use;          // of every job in `running`
  const QueueHistory& history;  // of these queues
};

// The job starts.
struct Start {
  JobId job;
  std::vector<v1::Placement> placements;  // of ranks 0 to ranks - 1, in this order
  bool in_turn = false;                   // no job of its queue that holds back others is before it
};
// Running jobs are stopped, and the slots are kept for the job until it starts: one that waits, was
// looked at and does not fit. Those that shrink for it have decisions of their own, before this
// one.
struct Preempt {
  JobId job;
  Eviction eviction;
};
// The slots kept for the job are given up, since one of them is gone.
struct GiveUpKept {
  JobId job;
};
// A running elastic job stops and goes on with as many ranks as it has slots here, which are kept
// for it.
struct Resize {
  Resized resized;
  JobId for_job;  // that gets the slots which it gives up; empty: nobody needs them
};
// Slots are set aside for a job that does not fit: it goes first in its queue and starts on them at
// about this time, if the jobs that hold them end when they are expected to. Until then other jobs
// start there only where they end before. Every plan says so anew for as long as it holds; there is
// nothing to be carried out but to tell people.
struct Reserve {
  JobId job;
  std::vector<Slot> slots;  // one for each of its ranks, by worker and in device order
  absl::Time starts_at;
};
using Decision = std::variant<Start, Preempt, GiveUpKept, Resize, Reserve>;
// False of a decision that changes nothing.
inline bool ChangesState(const Decision& decision) {
  return !std::holds_alternative<Reserve>(decision);
}
v1::SetAside AsMessage(const Reserve& reserve);
// Why a job waits. Many wait behind the same one: what there is to say about that one is kept once,
// and the message of each is made when it is read.
class Explanation {
 public:
  Explanation(JobId id, v1::WaitReason reason)
      : job(std::move(id)), reason_(std::make_shared<const v1::WaitReason>(std::move(reason))) {}
  // `reason` lacks what the job asks for but its queue.
  Explanation(const WaitingJob& waiting, std::shared_ptr<const v1::WaitReason> reason)
      : job(waiting.id),
        reason_(std::move(reason)),
        asks_(Asks{waiting.ranks, waiting.group, waiting.device, waiting.share}) {}

  v1::WaitReason reason() const;

  JobId job;

 private:
  struct Asks {
    int32_t ranks, group;
    v1::DeviceKind device;
    int32_t share;
  };
  std::shared_ptr<const v1::WaitReason> reason_;
  std::optional<Asks> asks_;
};
// How far back in the queues a plan looked. A job beyond this can join or leave without changing
// the plan; BehindMany() says why it waits.
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
  // The end of the back-off that ends first, or of the min_runtime of a job that may be stopped
  // then.
  absl::Time wake_at = absl::InfiniteFuture();
  // While jobs wait for others to start first: when to plan again, since shares have changed by
  // then.
  absl::Time again_at = absl::InfiniteFuture();
};

// Places jobs, each as a whole gang or not at all (PlaceGang); those for which slots are kept come
// first. The next queue is found from the top of the tree down. Of queues beside each other come
// first those that stay within what is guaranteed to them, then those whose first job has waited
// for QueueTree::turn_after (since it was queued, and since a first job of its queue last started),
// the one that has waited longest first, then the one with the smallest share (ShareOf), then the
// one whose first job has the larger priority or was submitted first. In a queue jobs go in order
// of (priority descending, deadline, submit_sequence).
//
// For the first job of a queue that does not fit, running jobs are stopped (ChooseVictims), or it
// holds back the others of its queue. Those start before it, as do jobs of other queues that come
// behind it, only where that does not delay it: they end before it will start, or take none of the
// slots that it will start on (Reserve, for the first `reservations_max` of such jobs). While it is
// not known when it will start, none of its own queue does, and once it has waited for
// QueueTree::passed_over_max none of any queue behind it that wants devices of its kind. Pure:
// equal inputs give equal outputs. Thread: any. O(queues x shapes
// + jobs looked at x (depth of the tree x queues beside each other) + jobs placed x (workers taken
// x different numbers of free slots + slots taken)), where the jobs looked at are those that start
// or back off, and for each queue and shape those that do not fit with `explained_behind` jobs
// behind each.
//
// An elastic job starts with the largest of its sizes that fits. Running ones grow, those of larger
// priority first, when slots are free that no job waits for, Elasticity::grow_after after they got
// theirs, and not shortly before their end; those whose users asked for a size get it as soon as it
// fits, larger ones too only while no job waits.
Schedule Plan(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now);

// The largest part of the cluster's devices of one kind that the queue uses, with its average in
// the past, divided by its weight.
double ShareOf(const Snapshot& cluster, const QueueUse& use, int queue, absl::Time now);
// A job whose end was expected so long ago may end at any time.
constexpr absl::Duration kOverrunMax = absl::Minutes(1);
constexpr absl::Duration kSharesInterval = absl::Minutes(1);  // Schedule::again_at

// Why a job beyond the horizon waits.
v1::WaitReason BehindMany(const WaitingJob& job, const SchedulePolicy& policy);

// What becomes of one job.
struct Forecast {
  std::optional<Start> start;  // the plan of now starts it
  // Else why not, with the fields that Explain alone sets.
  v1::WaitReason reason;
};
// The plan of now, looked at as far as this job, and then played ahead: running jobs end when they
// are expected to, those that are being stopped within kStopExpected, the slots go to the jobs that
// are next, until this one starts. Pure. O(jobs before it + kForecastStepsMax x (queues x shapes +
// slots released and taken)). Requires: the job is in the queue.
Forecast Explain(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
                 absl::Time now, const JobId& job);
constexpr absl::Duration kStopExpected = absl::Seconds(10);
// So many ends of jobs and back-offs are played ahead; a job that has not started by then has no
// estimate.
constexpr int kForecastStepsMax = 1024;

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_SCHEDULER_H_
