#include "coordinator/scheduler/scheduler.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.h"
#include "coordinator/scheduler/placement.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr int kWorkersNamedMax = 8;  // in one explanation

// What the job asks for.
v1::WaitReason ReasonOf(const WaitingJob& job, v1::WaitCode code) {
  v1::WaitReason reason;
  reason.set_code(code);
  reason.set_queue(job.queue);
  reason.set_ranks(job.ranks);
  reason.set_device(job.device);
  reason.set_group(job.group);
  return reason;
}

// Which jobs a plan looks at behind those that do not fit, and which it explains.
struct Scope {
  int behind = 0;  // SchedulePolicy::explained_behind
  bool explains = true;
  const JobId* only = nullptr;  // the plan ends at this job and explains no other
};

class Planner {
 public:
  Planner(SlotIndex::Trial& trial, const Snapshot& cluster, const SchedulePolicy& policy,
          absl::Time now, Scope scope)
      : index_(trial.index()),
        trial_(trial),
        running_(cluster.running),
        policy_(policy),
        now_(now),
        scope_(scope) {}

  // The slots of those that start stay taken in the trial.
  Schedule Run(const WaitingQueue& queue) {
    schedule_.wake_at = queue.NextRetry(now_);
    // For every queue and shape the first job that was not looked at, all merged into one order.
    std::map<QueueOrder, Cursor> heads;
    for (const auto& [name, shapes] : queue.queues()) {
      for (const auto& [shape, jobs] : shapes) {
        heads.emplace(jobs.begin()->first, Cursor{&queues_[name], jobs.begin(), jobs.end()});
      }
    }
    while (!heads.empty()) {
      Cursor cursor = heads.extract(heads.begin()).mapped();
      const WaitingJob& job = cursor.next->second;
      if (cursor.queue->blocker != nullptr && cursor.queue->behind >= scope_.behind) continue;
      Consider(job, cursor);
      if (scope_.only != nullptr && job.id == *scope_.only) break;
      if (cursor.queue->blocker != nullptr && cursor.queue->behind >= scope_.behind) {
        schedule_.horizon.queues.emplace(job.queue, job.order());
      } else if (cursor.misfit && cursor.behind >= scope_.behind) {
        schedule_.horizon.shapes.emplace(std::make_pair(job.queue, job.shape()), job.order());
      } else if (++cursor.next != cursor.end) {
        const QueueOrder order = cursor.next->first;
        heads.emplace(order, cursor);
      }
    }
    return std::move(schedule_);
  }

 private:
  struct QueueState {
    const WaitingJob* blocker = nullptr;  // the first job that does not fit and holds back others
    int behind = 0;                       // jobs looked at behind the blocker
  };
  // How far the plan has come with the jobs of one shape in one queue.
  struct Cursor {
    QueueState* queue;
    WaitingQueue::Jobs::const_iterator next, end;
    bool misfit = false;  // one did not fit, so that none behind it does
    int behind = 0;       // jobs looked at behind that one
  };

  void Consider(const WaitingJob& job, Cursor& cursor) {
    const WaitingJob* blocker = cursor.queue->blocker;
    if (blocker != nullptr) ++cursor.queue->behind;
    if (cursor.misfit) ++cursor.behind;
    if (job.not_before > now_) return Explain(job, [&] { return BackOff(job); });
    const SlotIndex::Kind& slots = index_.Of(job.device);
    const int group = UnitOf(job, slots);
    // A job that would not fit on the whole cluster if it were idle waits for more machines. It
    // holds back none.
    if (!CouldFit(job, slots)) {
      cursor.misfit = true;
      return Explain(job, [&] { return NeverFits(job, slots, group); });
    }
    if (blocker != nullptr) return Explain(job, [&] { return Behind(job, *blocker); });
    if (auto placements = PlaceGang(trial_, job); placements.has_value()) {
      return Place(job, *std::move(placements));
    }
    cursor.misfit = true;
    if (policy_.strict_fifo) cursor.queue->blocker = &job;
    Explain(job, [&] { return NotNow(job, slots, group); });
  }

  void Place(const WaitingJob& job, std::vector<v1::Placement> placements) {
    largest_holders_.erase(job.device);
    placed_names_.emplace(job.id, job.name);
    schedule_.decisions.emplace_back(Start{job.id, std::move(placements)});
  }

  // ---- reasons

  template <typename Reason>
  void Explain(const WaitingJob& job, Reason reason) {
    if (!scope_.explains || (scope_.only != nullptr && job.id != *scope_.only)) return;
    schedule_.explanations.push_back({job.id, reason()});
  }

  static v1::WaitReason BackOff(const WaitingJob& job) {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_BACK_OFF);
    *reason.mutable_until() = ToProto(job.not_before);
    return reason;
  }

  static v1::WaitReason Behind(const WaitingJob& job, const WaitingJob& blocker) {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_BEHIND);
    v1::WaitingJobRef& front = *reason.mutable_blocker();
    front.set_job_id(blocker.id.value());
    front.set_job_name(blocker.name);
    front.set_priority(blocker.priority);
    front.set_ranks(blocker.ranks);
    front.set_device(blocker.device);
    reason.mutable_change()->set_priority_above(blocker.priority);
    return reason;
  }

  static v1::WaitReason WithSlots(const WaitingJob& job, v1::WaitCode code,
                                  const SlotIndex::Kind& slots, int group) {
    v1::WaitReason reason = ReasonOf(job, code);
    reason.set_slots_total(slots.total);
    reason.set_slots_free(slots.free);
    reason.set_group(group);
    reason.set_groups_total(GroupsIn(slots, group));
    return reason;
  }

  v1::WaitReason NeverFits(const WaitingJob& job, const SlotIndex::Kind& slots, int group) const {
    if (index_.empty()) return WithSlots(job, v1::WAIT_CODE_NO_WORKERS, slots, group);
    if (slots.total < job.ranks) {
      v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_CLUSTER_TOO_SMALL, slots, group);
      reason.mutable_change()->set_slots_added(job.ranks - slots.total);
      if (slots.total > 0) {
        reason.mutable_change()->set_ranks_at_most(static_cast<int32_t>(slots.total));
      }
      return reason;
    }
    v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_GROUPS_TOO_LARGE, slots, group);
    reason.mutable_change()->set_worker_with_slots(group);
    reason.mutable_change()->set_tensor_lowered(true);
    return reason;
  }

  v1::WaitReason NotNow(const WaitingJob& job, const SlotIndex::Kind& slots, int group) {
    if (slots.free < job.ranks) {
      v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_SLOTS_TAKEN, slots, group);
      *reason.mutable_change() = CheapestChange(job.ranks - slots.free, job.device);
      return reason;
    }
    v1::WaitReason reason = WithSlots(job, v1::WAIT_CODE_SLOTS_SCATTERED, slots, group);
    std::map<WorkerId, int> named;
    for (auto alike = slots.workers_by_free.rbegin(); alike != slots.workers_by_free.rend();
         ++alike) {
      for (auto id = alike->second.begin();
           id != alike->second.end() && named.size() < kWorkersNamedMax; ++id) {
        named.emplace(*id, alike->first);
      }
    }
    for (const auto& [id, free] : named) {
      v1::WorkerSlots& worker = *reason.add_free();
      worker.set_worker(id.value());
      worker.set_slots(free);
    }
    return reason;
  }

  // What frees `missing` slots: the end of few jobs, namely of the smallest one that suffices, else
  // of the largest ones. Workers that are away are named last, since nobody knows when they return.
  v1::StartChange CheapestChange(int64_t missing, v1::DeviceKind kind) {
    const SlotIndex::Kind& all = index_.Of(kind);
    const auto [cached, first] = largest_holders_.try_emplace(kind);
    if (first) {
      for (const auto& [job, slots] : all.held) cached->second.emplace_back(-slots, job);
      std::sort(cached->second.begin(), cached->second.end());
    }
    std::vector<std::pair<int64_t, JobId>> jobs = cached->second;
    v1::StartChange change;
    while (missing > 0 && !jobs.empty()) {
      auto take = jobs.begin();
      for (auto it = jobs.begin(); it != jobs.end(); ++it) {
        if (-it->first >= missing) take = it;
      }
      v1::JobSlots& ends = *change.add_jobs_end();
      ends.set_job_id(take->second.value());
      ends.set_job_name(NameOf(take->second));
      ends.set_slots(-take->first);
      missing += take->first;
      jobs.erase(take);
    }
    if (missing > 0 && all.away_slots > 0) AddAway(kind, change);
    if (change.jobs_end().empty() && change.workers_return().empty()) {
      change.set_slots_released(true);
    }
    return change;
  }

  std::string NameOf(const JobId& job) const {
    if (const auto running = running_.find(job); running != running_.end()) {
      return running->second.name;
    }
    const auto placed = placed_names_.find(job);
    return placed == placed_names_.end() ? job.value() : placed->second;
  }

  void AddAway(v1::DeviceKind kind, v1::StartChange& change) const {
    const std::set<WorkerId>& away = index_.Of(kind).away;
    for (auto id = away.begin();
         id != away.end() && change.workers_return_size() < kWorkersNamedMax; ++id) {
      const WorkerView& worker = *index_.Find(*id);
      v1::AwayWorker& named = *change.add_workers_return();
      named.set_worker(id->value());
      named.set_slots(TotalSlots(worker, kind));
      named.set_reason(worker.away);
      named.set_ends_attempt(worker.ends_attempt);
    }
    change.set_workers_return_unnamed(static_cast<int64_t>(away.size()) -
                                      change.workers_return_size());
  }

  const SlotIndex& index_;
  SlotIndex::Trial& trial_;
  const std::map<JobId, RunningJob>& running_;
  const SchedulePolicy& policy_;
  const absl::Time now_;
  const Scope scope_;
  // By kind: the jobs that hold slots, most slots first (counted negative).
  std::map<v1::DeviceKind, std::vector<std::pair<int64_t, JobId>>> largest_holders_;
  std::map<JobId, std::string> placed_names_;  // of the jobs that this plan starts
  std::map<std::string, QueueState> queues_;
  Schedule schedule_;
};

// When `job` starts if nothing but ends of running jobs and of back-offs happens; InfiniteFuture
// when that is not known.
absl::Time EstimateStart(const Snapshot& cluster, WaitingQueue queue, const SchedulePolicy& policy,
                         absl::Time now, const JobId& job) {
  SlotIndex::Trial trial(cluster.slots);
  std::multimap<absl::Time, JobId> ends;
  for (const auto& [id, running] : cluster.running) {
    if (running.ends_at != absl::InfiniteFuture()) {
      ends.emplace(std::max(now, running.ends_at), id);
    }
  }
  for (int step = 0; step < kForecastStepsMax; ++step) {
    const Schedule next =
        Planner(trial, cluster, policy, now, {.behind = 0, .explains = false}).Run(queue);
    for (const Decision& decision : next.decisions) {
      const JobId& started = std::get<Start>(decision).job;
      if (started == job) return now;
      if (const absl::Duration runtime = queue.Find(started)->runtime;
          runtime != absl::InfiniteDuration()) {
        ends.emplace(now + runtime, started);
      }
      queue.Remove(started);
    }
    now = std::min(next.wake_at, ends.empty() ? absl::InfiniteFuture() : ends.begin()->first);
    if (now == absl::InfiniteFuture()) break;
    while (!ends.empty() && ends.begin()->first <= now) {
      trial.Release(ends.begin()->second);
      ends.erase(ends.begin());
    }
  }
  return absl::InfiniteFuture();
}

}  // namespace

Schedule Plan(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now) {
  SlotIndex::Trial trial(cluster.slots);
  return Planner(trial, cluster, policy, now, {.behind = policy.explained_behind}).Run(queue);
}

Forecast Explain(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
                 absl::Time now, const JobId& job) {
  const WaitingJob* waiting = queue.Find(job);
  CHECK(waiting != nullptr) << job << " does not wait";
  Forecast forecast;
  {
    SlotIndex::Trial trial(cluster.slots);
    Schedule plan = Planner(trial, cluster, policy, now,
                            {.behind = std::numeric_limits<int>::max(), .only = &job})
                        .Run(queue);
    for (Decision& decision : plan.decisions) {
      if (Start& start = std::get<Start>(decision); start.job == job) {
        forecast.start = std::move(start);
        return forecast;
      }
    }
    CHECK_EQ(plan.explanations.size(), 1u) << job;
    forecast.reason = std::move(plan.explanations[0].reason);
  }
  forecast.reason.set_ahead(queue.CountBefore(*waiting));
  const absl::Time start = EstimateStart(cluster, queue, policy, now, job);
  if (start != absl::InfiniteFuture()) {
    *forecast.reason.mutable_estimated_start() = ToProto(start);
  }
  return forecast;
}

bool PlanningHorizon::Excludes(const WaitingJob& job) const {
  const auto queue = queues.find(job.queue);
  if (queue != queues.end() && queue->second < job.order()) return true;
  const auto shape = shapes.find({job.queue, job.shape()});
  return shape != shapes.end() && shape->second < job.order();
}

v1::WaitReason BehindMany(const WaitingJob& job, const SchedulePolicy& policy) {
  v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_BEHIND_MANY);
  reason.set_behind_more_than(policy.explained_behind);
  return reason;
}

}  // namespace muster::coordinator
