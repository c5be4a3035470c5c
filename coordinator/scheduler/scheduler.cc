#include "coordinator/scheduler/scheduler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

constexpr size_t kWorkersNamedMax = 8;  // in one explanation

std::string Count(int64_t n, absl::string_view noun) {
  return absl::StrCat(n, " ", noun, n == 1 ? "" : "s");
}

// The number of whole groups of `group` slots that all workers together have.
int64_t GroupsIn(const SlotIndex::Kind& slots, int group) {
  int64_t groups = 0;
  for (const auto& [size, workers] : slots.workers_by_total) {
    groups += static_cast<int64_t>(size / group) * workers;
  }
  return groups;
}

// The ranks of a job in the order in which they take slots: group by group, the groups in order of
// their lowest ranks.
std::vector<int32_t> RanksByGroup(const WaitingJob& job) {
  std::vector<int32_t> ranks;
  for (int32_t group = 0; group < job.ranks / job.group; ++group) {
    const int32_t first = group / job.stride * (job.stride * job.group) + group % job.stride;
    for (int32_t i = 0; i < job.group; ++i) ranks.push_back(first + i * job.stride);
  }
  return ranks;
}

// The workers to take, ascending; empty when the gang does not fit. `units` is the gang's size in
// groups of `group` slots.
std::vector<WorkerId> ChooseWorkers(const SlotIndex::Kind& slots, int group, int units) {
  // Workers with equally many free groups, by id; those of one number of free slots are in order.
  using Range = std::pair<std::set<WorkerId>::const_iterator, std::set<WorkerId>::const_iterator>;
  struct Alike {
    std::vector<Range> ranges;
    int64_t count = 0;
  };
  std::map<int, Alike> by_free;
  for (const auto& [free, workers] : slots.workers_by_free) {
    if (free < group) continue;
    Alike& alike = by_free[free / group];
    alike.ranges.emplace_back(workers.begin(), workers.end());
    alike.count += static_cast<int64_t>(workers.size());
  }
  // What the `count` freest workers hold, and how much the least free of them does.
  const auto freest = [&by_free](int64_t count) {
    int64_t sum = 0;
    int least = 0;
    for (auto at = by_free.rbegin(); at != by_free.rend() && count > 0; ++at) {
      const int64_t here = std::min(count, at->second.count);
      if (here == 0) continue;
      sum += here * at->first;
      count -= here;
      least = at->first;
    }
    return std::make_pair(sum, least);
  };
  // The fewest workers that can hold the gang: as many of the freest ones as it takes.
  int64_t fewest = 0;
  int64_t missing = units;
  for (auto at = by_free.rbegin(); at != by_free.rend() && missing > 0; ++at) {
    const int64_t here = std::min(at->second.count, (missing + at->first - 1) / at->first);
    fewest += here;
    missing -= here * at->first;
  }
  if (missing > 0) return {};
  std::vector<WorkerId> chosen;
  missing = units;
  for (int64_t left = fewest; left > 0; --left) {
    // The least free worker with which the `left` - 1 freest of the others hold what is missing.
    const auto [sum, least] = freest(left);
    auto best = by_free.lower_bound(static_cast<int>(std::max<int64_t>(0, missing - sum + least)));
    while (best != by_free.end() && best->second.count == 0) ++best;
    CHECK(best != by_free.end()) << "the gang fits, yet no worker can be next";
    // Of equally free workers the one with the lowest id.
    Range* lowest = nullptr;
    for (Range& range : best->second.ranges) {
      if (range.first == range.second) continue;
      if (lowest == nullptr || *range.first < *lowest->first) lowest = &range;
    }
    chosen.push_back(*lowest->first++);
    --best->second.count;
    missing -= best->first;
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

class Planner {
 public:
  Planner(SlotIndex& slots, const SchedulePolicy& policy, absl::Time now)
      : index_(slots), trial_(slots), policy_(policy), now_(now) {}

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
      if (cursor.queue->behind >= policy_.explained_behind) continue;
      Consider(job, cursor);
      if (cursor.queue->behind >= policy_.explained_behind) {
        schedule_.horizon.queues.emplace(job.queue, job.order());
      } else if (cursor.behind >= policy_.explained_behind) {
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
    if (job.not_before > now_) {
      Explain(job, absl::StrCat(
                       "backs off after a failure; tries again at ",
                       absl::FormatTime("%H:%M:%E1S UTC", job.not_before, absl::UTCTimeZone())));
      return;
    }
    const SlotIndex::Kind& slots = index_.Of(job.device);
    const int group = UnitOf(job, slots);
    const int units = job.ranks / group;
    // A job that would not fit on the whole cluster if it were idle waits for more machines. It
    // holds back none.
    if (slots.total < job.ranks || GroupsIn(slots, group) < units) {
      cursor.misfit = true;
      Explain(job, WhyNot(job, slots));
      return;
    }
    if (blocker != nullptr) {
      Explain(job, absl::StrCat("waits behind job ", blocker->name, " (priority ",
                                blocker->priority, ", needs ",
                                Count(blocker->ranks, spec::EnumName(blocker->device) + " slot"),
                                ") in queue ", job.queue,
                                "; starts before it with a priority above ", blocker->priority));
      return;
    }
    std::vector<WorkerId> workers;
    if (slots.free >= job.ranks) workers = ChooseWorkers(slots, group, units);
    if (!workers.empty()) {
      Place(job, workers, group);
      return;
    }
    cursor.misfit = true;
    if (policy_.strict_fifo) cursor.queue->blocker = &job;
    Explain(job, WhyNot(job, slots));
  }

  // How many slots of one worker are taken at a time: a tensor group, unless no worker is as large.
  static int UnitOf(const WaitingJob& job, const SlotIndex::Kind& slots) {
    const int largest = slots.workers_by_total.empty() ? 0 : slots.workers_by_total.rbegin()->first;
    return job.group <= largest && job.ranks % job.group == 0 ? job.group : 1;
  }

  void Place(const WaitingJob& job, const std::vector<WorkerId>& workers, int group) {
    Decision decision;
    decision.job = job.id;
    decision.placements.resize(static_cast<size_t>(job.ranks));
    std::vector<int32_t> order = RanksByGroup(job);
    // Groups cannot be kept whole: ranks take slots in the order of their numbers.
    if (group == 1) std::sort(order.begin(), order.end());
    size_t next = 0;
    for (const WorkerId& id : workers) {
      const int whole = FreeSlots(*index_.Find(id), job.device) / group * group;
      const int here = std::min(whole, static_cast<int>(order.size() - next));
      for (std::string& device : trial_.Take(id, job.device, here, job.name)) {
        const int32_t rank = order[next++];
        v1::Placement& placement = decision.placements[static_cast<size_t>(rank)];
        placement.set_rank(rank);
        placement.set_worker(id.value());
        placement.set_device(std::move(device));
      }
    }
    CHECK_EQ(next, order.size()) << job.id;
    largest_holders_.erase(job.device);
    schedule_.decisions.push_back(std::move(decision));
  }

  void Explain(const WaitingJob& job, std::string text) {
    schedule_.explanations.push_back({job.id, std::move(text)});
  }

  std::string WhyNot(const WaitingJob& job, const SlotIndex::Kind& slots) {
    const std::string kind = spec::EnumName(job.device);
    const int64_t total = slots.total, free = slots.free;
    if (index_.empty()) {
      return absl::StrCat("needs ", Count(job.ranks, kind + " slot"),
                          ", but no worker has joined; start muster-worker");
    }
    if (total < job.ranks) {
      return absl::StrCat("no worker set could ever hold ", Count(job.ranks, kind + " slot"),
                          ": the cluster has ", total, "; add ", Count(job.ranks - total, "slot"),
                          total > 0
                              ? absl::StrCat(" or lower resources.ranks to ", total)
                              : absl::StrCat(" of kind ", kind, " or change resources.device"),
                          job.device == v1::DEVICE_KIND_CUDA
                              ? ". `muster get workers` and the logs of daemons say why a GPU is "
                                "not offered"
                              : "");
    }
    const int group = UnitOf(job, slots);
    if (group > 1) {
      const int64_t units = job.ranks / group;
      const std::string groups = absl::StrCat(units, " tensor group", units == 1 ? "" : "s", " of ",
                                              Count(group, kind + " slot"), ", each on one worker");
      if (const int64_t capacity = GroupsIn(slots, group); capacity < units) {
        return absl::StrCat("no worker set could ever hold ", groups, ": the cluster can hold ",
                            capacity, "; add workers with ", group,
                            " slots or lower engine.parallel.tensor");
      }
      if (free >= job.ranks) {
        std::map<WorkerId, int> by_id;
        for (const auto& [here, workers] : slots.workers_by_free) {
          size_t named = 0;
          for (auto id = workers.begin(); id != workers.end() && named < kWorkersNamedMax;
               ++named) {
            by_id.emplace(*id++, here);
          }
        }
        std::vector<std::string> by_worker;
        for (const auto& [id, here] : by_id) {
          by_worker.push_back(absl::StrCat(id.value(), " ", here));
          if (by_worker.size() == kWorkersNamedMax) break;
        }
        return absl::StrCat("needs ", groups, "; free are ", absl::StrJoin(by_worker, ", "),
                            "; starts when jobs on one of them end");
      }
    }
    const std::string numbers = absl::StrCat("needs ", Count(job.ranks, kind + " slot"), ", ", free,
                                             free == 1 ? " is" : " are", " free of ", total);
    return absl::StrCat(numbers, "; ", CheapestChange(job.ranks - free, job.device));
  }

  // What frees `missing` slots: the end of few jobs, namely of the smallest one that suffices, else
  // of the largest ones. Workers that are away are named last, since nobody knows when they return.
  std::string CheapestChange(int64_t missing, v1::DeviceKind kind) {
    const SlotIndex::Kind& all = index_.Of(kind);
    const auto [cached, first] = largest_holders_.try_emplace(kind);
    if (first) {
      for (const auto& [name, slots] : all.held) cached->second.emplace_back(-slots, name);
      std::sort(cached->second.begin(), cached->second.end());
    }
    std::vector<std::pair<int64_t, std::string>> jobs = cached->second;
    std::vector<std::string> ending;
    while (missing > 0 && !jobs.empty()) {
      auto take = jobs.begin();
      for (auto it = jobs.begin(); it != jobs.end(); ++it) {
        if (-it->first >= missing) take = it;
      }
      ending.push_back(absl::StrCat("job ", take->second, " (", Count(-take->first, "slot"), ")"));
      missing += take->first;
      jobs.erase(take);
    }
    std::string text;
    if (!ending.empty()) {
      text = absl::StrCat("starts when ", absl::StrJoin(ending, " and "),
                          ending.size() == 1 ? " ends" : " end");
    }
    if (missing > 0 && all.away_slots > 0) {
      absl::StrAppend(&text, text.empty() ? "starts when " : " and when ",
                      "workers that are away return: ", AwayText(kind));
    }
    if (text.empty()) text = "starts when the slots of ended attempts are released";
    return text;
  }

  std::string AwayText(v1::DeviceKind kind) const {
    std::vector<std::string> named;
    const std::set<WorkerId>& away = index_.Of(kind).away;
    for (auto id = away.begin(); id != away.end() && named.size() < kWorkersNamedMax; ++id) {
      const WorkerView& worker = *index_.Find(*id);
      const auto slots = std::count_if(worker.slots.begin(), worker.slots.end(),
                                       [kind](const SlotView& slot) { return slot.kind == kind; });
      named.push_back(
          absl::StrCat(id->value(), " (", Count(slots, "slot"), ") ", worker.unready_reason));
    }
    if (away.size() > named.size()) {
      named.push_back(absl::StrCat("and ", away.size() - named.size(), " more"));
    }
    return absl::StrJoin(named, ", ");
  }

  SlotIndex& index_;
  SlotIndex::Trial trial_;  // the slots that the decisions so far take
  const SchedulePolicy& policy_;
  const absl::Time now_;
  // By kind: the jobs that hold slots, most slots first (counted negative), then by name.
  std::map<v1::DeviceKind, std::vector<std::pair<int64_t, std::string>>> largest_holders_;
  std::map<std::string, QueueState> queues_;
  Schedule schedule_;
};

}  // namespace

Schedule Plan(SlotIndex& slots, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now) {
  return Planner(slots, policy, now).Run(queue);
}

Schedule Plan(const ClusterView& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now) {
  SlotIndex slots;
  for (const WorkerView& worker : cluster.workers) slots.Put(worker);
  return Plan(slots, queue, policy, now);
}

bool PlanningHorizon::Excludes(const WaitingJob& job) const {
  const auto queue = queues.find(job.queue);
  if (queue != queues.end() && queue->second < job.order()) return true;
  const auto shape = shapes.find({job.queue, job.shape()});
  return shape != shapes.end() && shape->second < job.order();
}

std::string BehindText(const std::string& queue, const SchedulePolicy& policy) {
  return absl::StrCat("more than ", policy.explained_behind, " jobs go before it in queue ", queue,
                      "; a higher priority moves it up");
}

}  // namespace muster::coordinator
