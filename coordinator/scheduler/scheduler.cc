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
  bool preempts = true;
  const JobId* only = nullptr;  // the plan ends at this job and explains no other
};

// What a plan tries on the index of slots; all is as before when it is destroyed.
struct Attempted {
  explicit Attempted(SlotIndex& slots) : index(slots), trial(slots) {}
  ~Attempted() {
    trial.Rollback();  // what it took may have been given away before
    for (auto change = given.rbegin(); change != given.rend(); ++change) {
      index.SetHolder(change->first.worker, change->first.device, change->second);
    }
  }
  Attempted(const Attempted&) = delete;
  Attempted& operator=(const Attempted&) = delete;

  // Gives a slot that is free or kept for a job that waits to another one; empty: to none.
  void Give(const Slot& slot, const JobId& before, const JobId& holder) {
    given.emplace_back(slot, before);
    index.SetHolder(slot.worker, slot.device, holder);
  }

  SlotIndex& index;
  SlotIndex::Trial trial;
  std::vector<std::pair<Slot, JobId>> given;  // with who held it before
};

// The slots that a job holds.
std::vector<Slot> SlotsOf(const SlotIndex& index, const JobId& job) {
  std::vector<Slot> slots;
  for (const WorkerId& id : index.WorkersOf(job)) {
    for (const SlotView& slot : index.Find(id)->slots) {
      if (slot.held_by == job) slots.push_back({id, slot.device});
    }
  }
  return slots;
}

// Null when there is no such slot.
const SlotView* FindSlot(const SlotIndex& index, const Slot& slot) {
  const WorkerView* worker = index.Find(slot.worker);
  if (worker == nullptr) return nullptr;
  for (const SlotView& view : worker->slots) {
    if (view.device == slot.device) return &view;
  }
  return nullptr;
}

class Planner {
 public:
  Planner(Attempted& attempted, const Snapshot& cluster, const SchedulePolicy& policy,
          absl::Time now, Scope scope)
      : attempted_(attempted),
        index_(attempted.index),
        trial_(attempted.trial),
        running_(cluster.running),
        policy_(policy),
        now_(now),
        scope_(scope),
        kept_(cluster.kept) {}

  // The slots of those that start stay taken in the trial.
  Schedule Run(const WaitingQueue& queue) {
    schedule_.wake_at = queue.NextRetry(now_);
    StartKept(queue);
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
      if (!settled_.contains(job.id)) Consider(job, cursor);
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

  EvictionSearch evictions() const { return {attempted_.index, running_, kept_, stopped_, now_}; }

  // The jobs for which slots are kept start, go on waiting for them, or give them up.
  void StartKept(const WaitingQueue& queue) {
    std::map<QueueOrder, const WaitingJob*> jobs;
    for (const auto& [id, kept] : kept_) {
      const WaitingJob* job = queue.Find(id);
      if (job != nullptr) jobs.emplace(job->order(), job);
    }
    for (const auto& [order, waiting] : jobs) {
      const WaitingJob* const job = waiting;  // a lambda cannot hold a structured binding
      if (auto placements = TryPlace(*job); placements.has_value()) {
        settled_.insert(job->id);
        kept_.erase(job->id);
        Place(*job, *std::move(placements));
      } else if (StillKept(evictions(), job->id, kept_.find(job->id)->second)) {
        settled_.insert(job->id);
        Explain(*job, [&] { return KeptFor(*job); });
      } else {
        GiveUp(job->id);
        schedule_.decisions.emplace_back(GiveUpKept{job->id});
      }
    }
  }

  // Slots that are kept for the job are free again.
  void GiveUp(const JobId& job) {
    for (const Slot& slot : SlotsOf(index_, job)) attempted_.Give(slot, job, JobId());
    kept_.erase(job);
  }

  // The slots that are kept for the job count as free.
  std::optional<std::vector<v1::Placement>> TryPlace(const WaitingJob& job) {
    if (index_.WorkersOf(job.id).empty()) return PlaceGang(trial_, job);
    const std::vector<Slot> own = SlotsOf(index_, job.id);
    trial_.Release(job.id);
    auto placements = PlaceGang(trial_, job);
    if (!placements.has_value()) {
      for (const Slot& slot : own) attempted_.index.SetHolder(slot.worker, slot.device, job.id);
    }
    return placements;
  }

  // Stops running jobs so that this one can start; false when that does not help.
  bool TryPreempt(const WaitingJob& job) {
    if (!scope_.preempts) return false;
    std::optional<Eviction> eviction = ChooseVictims(evictions(), job, schedule_.wake_at);
    if (!eviction.has_value()) return false;
    for (const JobId& id : eviction->outbid) {
      GiveUp(id);
      settled_.erase(id);
    }
    stopped_.insert(eviction->stopped.begin(), eviction->stopped.end());
    Kept& kept = kept_[job.id];
    kept = {job.queue, job.priority, job.device, {}};
    for (const Slot& slot : eviction->slots) {
      kept.slots.insert(slot);
      const SlotView* view = FindSlot(index_, slot);
      if (view != nullptr && !view->held()) attempted_.Give(slot, JobId(), job.id);
    }
    settled_.insert(job.id);
    largest_holders_.erase(job.device);
    Explain(job, [&] { return KeptFor(job); });
    schedule_.decisions.emplace_back(Preempt{job.id, *std::move(eviction)});
    return true;
  }

  void Consider(const WaitingJob& job, Cursor& cursor) {
    const WaitingJob* blocker = cursor.queue->blocker;
    if (blocker != nullptr) ++cursor.queue->behind;
    if (cursor.misfit) ++cursor.behind;
    if (job.not_before > now_) return Explain(job, [&] { return BackOff(job); });
    const SlotIndex::Kind& slots = index_.Of(job.device);
    const int group = UnitOf(job, slots);
    // A job that would not fit on the whole cluster if it were idle waits for more machines. It
    // holds back none.
    if (!CouldFit(job, index_)) {
      cursor.misfit = true;
      return Explain(job, [&] { return NeverFits(job, slots, group); });
    }
    if (blocker != nullptr) return Explain(job, [&] { return Behind(job, *blocker); });
    if (auto placements = TryPlace(job); placements.has_value()) {
      return Place(job, *std::move(placements));
    }
    if (TryPreempt(job)) return;
    cursor.misfit = true;
    if (policy_.strict_fifo) cursor.queue->blocker = &job;
    // Not `slots`: what was tried meanwhile may have moved them.
    Explain(job, [&] { return NotNow(job, index_.Of(job.device), group); });
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

  // Which jobs are to leave slots to it.
  v1::WaitReason KeptFor(const WaitingJob& job) const {
    v1::WaitReason reason = ReasonOf(job, v1::WAIT_CODE_SLOTS_KEPT);
    std::map<JobId, int64_t> stopping;
    for (const Slot& slot : kept_.find(job.id)->second.slots) {
      const SlotView* view = FindSlot(index_, slot);
      if (view != nullptr && view->held() && view->held_by != job.id) ++stopping[view->held_by];
    }
    for (const auto& [id, slots] : stopping) {
      v1::JobSlots& holder = *reason.add_stopping();
      holder.set_job_id(id.value());
      holder.set_job_name(NameOf(id));
      holder.set_slots(slots);
    }
    return reason;
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
    reason.set_slots_reserved(slots.reserved);
    return reason;
  }

  v1::WaitReason OutsideDomains(const WaitingJob& job, v1::WaitCode code,
                                const SlotIndex::Kind& slots, int group,
                                const DomainShortage& shortage) const {
    v1::WaitReason reason = WithSlots(job, code, slots, group);
    reason.set_level(shortage.level);
    reason.set_segment(shortage.segment);
    reason.set_domain(shortage.domain);
    reason.set_domain_slots(shortage.slots);
    for (const auto& [id, held] : shortage.jobs) {
      v1::JobSlots& ends = *reason.mutable_change()->add_jobs_end();
      ends.set_job_id(id.value());
      ends.set_job_name(NameOf(id));
      ends.set_slots(held);
    }
    if (shortage.level_at_least != v1::TOPOLOGY_LEVEL_UNSPECIFIED &&
        job.placement.required != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
      reason.mutable_change()->set_level_at_least(shortage.level_at_least);
    }
    if (code == v1::WAIT_CODE_DOMAINS_TOO_SMALL && shortage.slots > 0) {
      reason.mutable_change()->set_ranks_at_most(static_cast<int32_t>(shortage.slots));
    }
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
    if (const auto shortage = FindDomainShortage(job, index_, /*ever=*/true)) {
      return OutsideDomains(job, v1::WAIT_CODE_DOMAINS_TOO_SMALL, slots, group, *shortage);
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
    if (const auto shortage = FindDomainShortage(job, index_, /*ever=*/false)) {
      return OutsideDomains(job, v1::WAIT_CODE_DOMAINS_FULL, slots, group, *shortage);
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
      for (const auto& [job, slots] : all.held) {
        if (!kept_.contains(job)) cached->second.emplace_back(-slots, job);
      }
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
    if (const RunningJob* running = running_.Find(job); running != nullptr) return running->name;
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

  Attempted& attempted_;
  const SlotIndex& index_;
  SlotIndex::Trial& trial_;
  const RunningJobs& running_;
  const SchedulePolicy& policy_;
  const absl::Time now_;
  const Scope scope_;
  // By kind: the jobs that hold slots, most slots first (counted negative).
  std::map<v1::DeviceKind, std::vector<std::pair<int64_t, JobId>>> largest_holders_;
  std::map<JobId, std::string> placed_names_;  // of the jobs that this plan starts
  std::map<std::string, QueueState> queues_;
  KeptSlots kept_;
  std::set<JobId> stopped_;  // jobs that this plan stops
  std::set<JobId> settled_;  // jobs for which slots are kept, or that had some and start
  Schedule schedule_;
};

// When `job` starts if nothing but ends of running jobs and of back-offs happens; InfiniteFuture
// when that is not known.
absl::Time EstimateStart(const Snapshot& cluster, WaitingQueue queue, const SchedulePolicy& policy,
                         absl::Time now, const JobId& job) {
  Attempted attempted(cluster.slots);
  std::multimap<absl::Time, JobId> ends;
  for (const auto& [id, running] : cluster.running.all()) {
    const absl::Time end = running.stopping ? now + kStopExpected : running.ends_at;
    if (end != absl::InfiniteFuture()) ends.emplace(std::max(now, end), id);
  }
  const auto end_at = [&ends](const JobId& id, absl::Time at) {
    std::erase_if(ends, [&id](const auto& end) { return end.second == id; });
    ends.emplace(at, id);
  };
  for (int step = 0; step < kForecastStepsMax; ++step) {
    // Who is stopped later depends on more than is known here.
    const Schedule next = Planner(attempted, cluster, policy, now,
                                  {.behind = 0, .explains = false, .preempts = step == 0})
                              .Run(queue);
    for (const Decision& decision : next.decisions) {
      if (const auto* preempt = std::get_if<Preempt>(&decision)) {
        if (preempt->job == job) return now + kStopExpected;
        for (const JobId& id : preempt->eviction.stopped) end_at(id, now + kStopExpected);
      }
      const auto* start = std::get_if<Start>(&decision);
      if (start == nullptr) continue;
      if (start->job == job) return now;
      if (const absl::Duration runtime = queue.Find(start->job)->runtime;
          runtime != absl::InfiniteDuration()) {
        ends.emplace(now + runtime, start->job);
      }
      queue.Remove(start->job);
    }
    now = std::min(next.wake_at, ends.empty() ? absl::InfiniteFuture() : ends.begin()->first);
    if (now == absl::InfiniteFuture()) break;
    while (!ends.empty() && ends.begin()->first <= now) {
      attempted.trial.Release(ends.begin()->second);
      ends.erase(ends.begin());
    }
  }
  return absl::InfiniteFuture();
}

}  // namespace

Schedule Plan(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now) {
  Attempted attempted(cluster.slots);
  return Planner(attempted, cluster, policy, now, {.behind = policy.explained_behind}).Run(queue);
}

Forecast Explain(const Snapshot& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
                 absl::Time now, const JobId& job) {
  const WaitingJob* waiting = queue.Find(job);
  CHECK(waiting != nullptr) << job << " does not wait";
  Forecast forecast;
  {
    Attempted attempted(cluster.slots);
    Schedule plan = Planner(attempted, cluster, policy, now,
                            {.behind = std::numeric_limits<int>::max(), .only = &job})
                        .Run(queue);
    for (Decision& decision : plan.decisions) {
      Start* start = std::get_if<Start>(&decision);
      if (start == nullptr || start->job != job) continue;
      forecast.start = std::move(*start);
      return forecast;
    }
    CHECK(!plan.explanations.empty()) << job;
    forecast.reason = std::move(plan.explanations.back().reason);
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
