// What the scheduler plans with, kept up to date change by change: the jobs that wait, those that
// hold slots, the policy, and how far the newest plan looked.
#ifndef MUSTER_COORDINATOR_CORE_SCHEDULING_H_
#define MUSTER_COORDINATOR_CORE_SCHEDULING_H_

#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/scheduler/scheduler.h"

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
  // Why a job that was added waits, as far as is known before the next plan.
  v1::WaitReason BeforePlan(const WaitingJob& job) const { return BehindMany(job, policy_); }
  // The jobs whose back-off has ended; each is returned once.
  std::vector<JobId> TakeRetries(absl::Time now) { return waiting_.TakeRetries(now); }

  // ---- jobs that hold slots: every job with an attempt
  void AddRunning(const JobId& id, RunningJob job) { running_.Put(id, std::move(job)); }
  void RemoveRunning(const JobId& id) { running_.Remove(id); }
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

  // ---- plans
  // Jobs that the plan before this one explained one by one and this one does not look at are
  // among the explanations too.
  Schedule MakePlan(absl::Time now);
  // What becomes of one job: one that waits, or `added`, as if it waited too.
  Forecast Explain(const JobId& id, std::optional<WaitingJob> added, absl::Time now);

 private:
  Snapshot Cluster() { return {slots_, running_, kept_}; }

  SlotIndex& slots_;
  const SchedulePolicy policy_;
  WaitingQueue waiting_;
  RunningJobs running_;
  KeptSlots kept_;
  // Of the newest plan; valid until slots, workers or the jobs within it change.
  PlanningHorizon horizon_;
  std::set<JobId> explained_;  // jobs that the newest plan explained one by one
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_SCHEDULING_H_
