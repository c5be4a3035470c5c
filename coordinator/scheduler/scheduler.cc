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

// Slots of one kind that new ranks can take; 0 on a worker that is not ready.
int FreeSlots(const WorkerView& worker, v1::DeviceKind kind) {
  if (!worker.ready) return 0;
  return static_cast<int>(
      std::count_if(worker.slots.begin(), worker.slots.end(),
                    [kind](const SlotView& slot) { return slot.free && slot.kind == kind; }));
}

// The number of whole groups of `group` slots that these workers have.
int64_t GroupsIn(const std::vector<int>& slots_by_worker, int group) {
  int64_t groups = 0;
  for (const int slots : slots_by_worker) groups += slots / group;
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

// The indices of the workers to take, ascending; empty when the gang does not fit. `free` and
// `ranks` count slots, or groups of slots.
std::vector<size_t> ChooseWorkers(const std::vector<int>& free, int ranks) {
  std::vector<size_t> by_free;  // most free first; equal ones by id
  for (size_t i = 0; i < free.size(); ++i) {
    if (free[i] > 0) by_free.push_back(i);
  }
  std::stable_sort(by_free.begin(), by_free.end(),
                   [&free](size_t a, size_t b) { return free[a] > free[b]; });
  // The fewest workers that can hold the gang: as many of the freest ones as it takes.
  size_t fewest = 0;
  for (int64_t held = 0; held < ranks; ++fewest) {
    if (fewest == by_free.size()) return {};
    held += free[by_free[fewest]];
  }
  std::vector<size_t> chosen;
  int64_t missing = ranks;
  for (size_t left = fewest; left > 0; --left) {
    // What the `left` freest workers can hold.
    int64_t top = 0;
    for (size_t i = 0; i < left && i < by_free.size(); ++i) top += free[by_free[i]];
    size_t best = by_free.size();
    for (size_t i = by_free.size(); i-- > 0;) {
      // What worker i and the `left` - 1 freest of the others can hold.
      const int64_t with = i < left ? top : top - free[by_free[left - 1]] + free[by_free[i]];
      if (with >= missing) {
        best = i;
        break;
      }
    }
    CHECK_LT(best, by_free.size()) << "the gang fits, yet no worker can be next";
    // Of equally free workers the one with the lowest id.
    while (best > 0 && free[by_free[best - 1]] == free[by_free[best]]) --best;
    chosen.push_back(by_free[best]);
    missing -= free[by_free[best]];
    by_free.erase(by_free.begin() + static_cast<std::ptrdiff_t>(best));
  }
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

class Planner {
 public:
  Planner(const ClusterView& cluster, const SchedulePolicy& policy, absl::Time now)
      : cluster_(cluster), policy_(policy), now_(now) {}

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
  // All slots of one kind, for placement and explanations.
  struct Slots {
    std::vector<int> free_by_worker, total_by_worker;
    int64_t total = 0, free = 0;
    std::map<std::string, int64_t> held;  // job name -> slots on ready workers
    std::vector<std::string> away;        // workers that are not ready, with the reason
    int64_t away_slots = 0;
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
    const Slots& slots = Of(job.device);
    const int group = UnitOf(job, slots);
    const int units = job.ranks / group;
    // A job that would not fit on the whole cluster if it were idle waits for more machines. It
    // holds back none.
    if (slots.total < job.ranks || GroupsIn(slots.total_by_worker, group) < units) {
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
    std::vector<size_t> workers;
    if (slots.free >= job.ranks) {
      std::vector<int> free = slots.free_by_worker;
      for (int& of_worker : free) of_worker /= group;
      workers = ChooseWorkers(free, units);
    }
    if (!workers.empty()) {
      Place(job, workers, group);
      return;
    }
    cursor.misfit = true;
    if (policy_.strict_fifo) cursor.queue->blocker = &job;
    Explain(job, WhyNot(job, slots));
  }

  // The slots that the decisions so far leave.
  const Slots& Of(v1::DeviceKind kind) {
    const auto [found, inserted] = slots_.try_emplace(kind);
    if (inserted) found->second = CountSlots(kind);
    return found->second;
  }

  Slots CountSlots(v1::DeviceKind kind) const {
    Slots out;
    for (const WorkerView& worker : cluster_.workers) {
      int64_t here = 0;
      for (const SlotView& slot : worker.slots) {
        if (slot.kind != kind) continue;
        ++here;
        if (worker.ready && !slot.free && !slot.held_by.empty()) ++out.held[slot.held_by];
      }
      out.total += here;
      out.total_by_worker.push_back(static_cast<int>(here));
      out.free_by_worker.push_back(FreeSlots(worker, kind));
      out.free += out.free_by_worker.back();
      if (!worker.ready && here > 0) {
        out.away_slots += here;
        out.away.push_back(absl::StrCat(worker.id.value(), " (", Count(here, "slot"), ") ",
                                        worker.unready_reason));
      }
    }
    return out;
  }

  // How many slots of one worker are taken at a time: a tensor group, unless no worker is as large.
  static int UnitOf(const WaitingJob& job, const Slots& slots) {
    const int largest =
        slots.total_by_worker.empty()
            ? 0
            : *std::max_element(slots.total_by_worker.begin(), slots.total_by_worker.end());
    return job.group <= largest && job.ranks % job.group == 0 ? job.group : 1;
  }

  void Place(const WaitingJob& job, const std::vector<size_t>& workers, int group) {
    Decision decision;
    decision.job = job.id;
    decision.placements.resize(static_cast<size_t>(job.ranks));
    std::vector<int32_t> order = RanksByGroup(job);
    // Groups cannot be kept whole: ranks take slots in the order of their numbers.
    if (group == 1) std::sort(order.begin(), order.end());
    size_t next = 0;
    for (const size_t index : workers) {
      WorkerView& worker = cluster_.workers[index];
      int here = FreeSlots(worker, job.device) / group * group;
      for (SlotView& slot : worker.slots) {
        if (next == order.size() || here == 0) break;
        if (!slot.free || slot.kind != job.device) continue;
        --here;
        slot.free = false;
        slot.held_by = job.name;
        const int32_t rank = order[next++];
        v1::Placement& placement = decision.placements[static_cast<size_t>(rank)];
        placement.set_rank(rank);
        placement.set_worker(worker.id.value());
        placement.set_device(slot.device);
      }
    }
    CHECK_EQ(next, order.size()) << job.id;
    slots_.erase(job.device);
    schedule_.decisions.push_back(std::move(decision));
  }

  void Explain(const WaitingJob& job, std::string text) {
    schedule_.explanations.push_back({job.id, std::move(text)});
  }

  std::string WhyNot(const WaitingJob& job, const Slots& slots) const {
    const std::string kind = spec::EnumName(job.device);
    const int64_t total = slots.total, free = slots.free;
    if (cluster_.workers.empty()) {
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
      if (const int64_t capacity = GroupsIn(slots.total_by_worker, group); capacity < units) {
        return absl::StrCat("no worker set could ever hold ", groups, ": the cluster can hold ",
                            capacity, "; add workers with ", group,
                            " slots or lower engine.parallel.tensor");
      }
      if (free >= job.ranks) {
        std::vector<std::string> by_worker;
        for (size_t i = 0; i < slots.free_by_worker.size(); ++i) {
          if (slots.free_by_worker[i] == 0) continue;
          by_worker.push_back(
              absl::StrCat(cluster_.workers[i].id.value(), " ", slots.free_by_worker[i]));
          if (by_worker.size() == kWorkersNamedMax) break;
        }
        return absl::StrCat("needs ", groups, "; free are ", absl::StrJoin(by_worker, ", "),
                            "; starts when jobs on one of them end");
      }
    }
    const std::string numbers = absl::StrCat("needs ", Count(job.ranks, kind + " slot"), ", ", free,
                                             free == 1 ? " is" : " are", " free of ", total);
    return absl::StrCat(numbers, "; ", CheapestChange(job.ranks - free, slots));
  }

  // What frees `missing` slots: the end of few jobs, namely of the smallest one that suffices, else
  // of the largest ones. Workers that are away are named last, since nobody knows when they return.
  static std::string CheapestChange(int64_t missing, const Slots& all) {
    std::vector<std::pair<int64_t, std::string>> jobs;  // most slots first, then by name
    for (const auto& [name, slots] : all.held) jobs.emplace_back(-slots, name);
    std::sort(jobs.begin(), jobs.end());
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
                      "workers that are away return: ", absl::StrJoin(all.away, ", "));
    }
    if (text.empty()) text = "starts when the slots of ended attempts are released";
    return text;
  }

  ClusterView cluster_;  // a copy: decisions take slots from it
  const SchedulePolicy& policy_;
  const absl::Time now_;
  std::map<v1::DeviceKind, Slots> slots_;
  std::map<std::string, QueueState> queues_;
  Schedule schedule_;
};

}  // namespace

Schedule Plan(const ClusterView& cluster, const WaitingQueue& queue, const SchedulePolicy& policy,
              absl::Time now) {
  return Planner(cluster, policy, now).Run(queue);
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
