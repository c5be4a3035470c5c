// What the scheduler plans with, kept up to date change by change: the jobs that wait, those that
// hold slots, the policy, and how far the newest plan looked.
#ifndef MUSTER_COORDINATOR_CORE_SCHEDULING_H_
#define MUSTER_COORDINATOR_CORE_SCHEDULING_H_

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/scheduler/spares.h"
#include "muster/v1/queue.pb.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

// Thread: the core's. `slots` outlives it.
class Scheduling {
 public:
  explicit Scheduling(SlotIndex& slots) : slots_(slots) {}

  // ---- jobs that wait: every live job without an attempt
  // True: the next plan may differ from the newest one.
  bool Add(WaitingJob job);
  bool Remove(const JobId& id);
  bool Waits(const JobId& id) const { return waiting_.Contains(id); }
  size_t waiting() const { return waiting_.size(); }
  // Null when the job does not wait.
  const WaitingJob* FindWaiting(const JobId& id) const { return waiting_.Find(id); }
  // Why a job that was added waits, as far as is known before the next plan.
  v1::WaitReason BeforePlan(const WaitingJob& job) const { return BehindMany(job, policy_); }
  // The jobs whose back-off has ended; each is returned once.
  std::vector<JobId> TakeRetries(absl::Time now) { return waiting_.TakeRetries(now); }

  // ---- jobs that hold slots: every job with an attempt
  void AddRunning(const JobId& id, RunningJob job, absl::Time now);
  // As it was before a restart: what its queue has used up to now is known.
  void RecoverRunning(const JobId& id, RunningJob job);
  void RemoveRunning(const JobId& id, absl::Time now);
  bool Runs(const JobId& id) const { return running_.Contains(id); }
  const RunningJobs& running() const { return running_; }
  // Does nothing when the job holds no slot.
  template <typename Change>
  void ChangeRunning(const JobId& id, Change change) {
    const RunningJob* known = running_.Find(id);
    if (known == nullptr) return;
    RunningJob job = *known;
    change(job);
    if (!(job == *known)) running_.Put(id, std::move(job));
  }

  // ---- slots that are kept for jobs that wait
  void Keep(const JobId& id, Kept kept) { kept_.insert_or_assign(id, std::move(kept)); }
  void DropKept(const JobId& id) { kept_.erase(id); }
  const KeptSlots& kept() const { return kept_; }

  // ---- slots that the newest plan sets aside for jobs that wait
  void SetAside(const Reserve& reserve) {
    set_aside_.insert_or_assign(reserve.job, AsMessage(reserve));
  }
  // Null: none are known.
  const v1::SetAside* SetAsideFor(const JobId& id) const {
    const auto found = set_aside_.find(id);
    return found == set_aside_.end() ? nullptr : &found->second;
  }

  // ---- queues
  const QueueTree& tree() const { return tree_; }
  const QueueUse& use() const { return use_; }
  void SetTree(QueueTree tree, absl::Time now);
  void RecoverTree(QueueTree tree);
  // What the queues have used.
  const QueueHistory& history() const { return history_; }
  void RestoreHistory(const std::string& queue, const v1::QueueUsage& usage) {
    history_.Restore(queue, usage);
  }
  // A plan may give somebody a part of a device.
  bool MaySplitDevices() const;
  // To make a plan of an earlier time again.
  void SetHistory(QueueHistory history) { history_ = std::move(history); }
  // A job started that was the first of its queue.
  void TookTurn(const std::string& queue, absl::Time now);
  // The queues whose row of history has changed since the last call.
  std::set<std::string> TakeAccrued() { return std::exchange(accrued_, {}); }
  // The queues as they are used now, and the spares.
  v1::GetQueuesResponse Queues(absl::Time now);
  // What of a policy, the newest one, will hardly be meant: "field: why".
  std::vector<std::string> WarningsOf(const v1::QueuePolicy& policy);
  // The devices that are kept free now. Costs what it takes to choose them, after a change.
  const SpareCount& Spares();
  // False: `spare` is not what a count of them anew gives.
  bool SparesAreRight(int64_t spare) const;
  // The invariants that do not hold: what is used within what may be.
  std::vector<std::string> CheckQueues() const;

  // ---- plans
  // Jobs that the plan before this one explained one by one and this one does not look at are
  // among the explanations too.
  Schedule MakePlan(absl::Time now);
  // Whether a plan made now would decide anything that changes the state.
  bool WouldDecide(absl::Time now);
  // What becomes of one job: one that waits, or `added`, as if it waited too.
  Forecast Explain(const JobId& id, std::optional<WaitingJob> added, absl::Time now);

 private:
  Snapshot Cluster() { return {slots_, running_, kept_, tree_, use_, history_}; }
  void Accrue(const std::string& queue, absl::Time now);
  void Count(const RunningJob& job, int sign) {
    use_.Count(tree_, tree_.Find(job.queue), job.device, job.ranks, job.tenant, sign, job.share);
  }

  SlotIndex& slots_;
  const SchedulePolicy policy_;
  WaitingQueue waiting_;
  RunningJobs running_;
  KeptSlots kept_;
  QueueTree tree_;
  QueueUse use_{tree_};
  QueueHistory history_;
  uint64_t spares_as_of_ = 0;  // SlotIndex::version(); 0: to be counted anew
  SpareCount spares_;
  std::set<std::string> accrued_;
  // Of the newest plan; valid until slots, workers or the jobs within it change.
  PlanningHorizon horizon_;
  std::set<JobId> explained_;                // jobs that the newest plan explained one by one
  std::map<JobId, v1::SetAside> set_aside_;  // for jobs that wait
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_SCHEDULING_H_
