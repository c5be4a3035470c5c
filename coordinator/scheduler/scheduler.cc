#include "coordinator/scheduler/scheduler.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"

namespace muster::coordinator {
namespace {

std::string KindName(v1::DeviceKind kind) {
  switch (kind) {
    case v1::DEVICE_KIND_CUDA:
      return "cuda";
    case v1::DEVICE_KIND_CPU:
      return "cpu";
    default:
      return absl::StrCat("kind ", static_cast<int>(kind));
  }
}

std::string Count(int64_t n, absl::string_view noun) {
  return absl::StrCat(n, " ", noun, n == 1 ? "" : "s");
}

// Free slots of one kind on a worker that takes new ranks.
int FreeSlots(const WorkerView& worker, v1::DeviceKind kind) {
  if (!worker.ready) return 0;
  return static_cast<int>(
      std::count_if(worker.slots.begin(), worker.slots.end(),
                    [kind](const SlotView& slot) { return slot.free && slot.kind == kind; }));
}

// Indices of the workers to take, ascending; empty when the gang does not fit.
std::vector<size_t> ChooseWorkers(const std::vector<int>& free, int ranks) {
  std::vector<size_t> by_free;  // most free first; equal ones by id
  for (size_t i = 0; i < free.size(); ++i) {
    if (free[i] > 0) by_free.push_back(i);
  }
  std::stable_sort(by_free.begin(), by_free.end(),
                   [&free](size_t a, size_t b) { return free[a] > free[b]; });
  // The fewest workers that can do: as many of the freest as it takes.
  size_t fewest = 0;
  for (int64_t held = 0; held < ranks; ++fewest) {
    if (fewest == by_free.size()) return {};
    held += free[by_free[fewest]];
  }
  std::vector<size_t> chosen;
  int64_t missing = ranks;
  for (size_t left = fewest; left > 0; --left) {
    // What the `left` freest can hold.
    int64_t top = 0;
    for (size_t i = 0; i < left && i < by_free.size(); ++i) top += free[by_free[i]];
    size_t best = by_free.size();
    for (size_t i = by_free.size(); i-- > 0;) {
      // What worker i and the left - 1 freest of the others can hold.
      const int64_t with = i < left ? top : top - free[by_free[left - 1]] + free[by_free[i]];
      if (with >= missing) {
        best = i;
        break;
      }
    }
    CHECK_LT(best, by_free.size()) << "the gang fits, yet no worker can be next";
    // Of equally free workers take the lowest id.
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

  Schedule Run(std::vector<WaitingJob> queue) {
    std::stable_sort(queue.begin(), queue.end(), [](const WaitingJob& a, const WaitingJob& b) {
      if (a.priority != b.priority) return a.priority > b.priority;
      return a.submit_sequence < b.submit_sequence;
    });
    for (const WaitingJob& job : queue) Consider(job);
    return std::move(schedule_);
  }

 private:
  void Consider(const WaitingJob& job) {
    if (job.not_before > now_) {
      schedule_.wake_at = std::min(schedule_.wake_at, job.not_before);
      Explain(job, absl::StrCat("backs off after a failure; tries again in ",
                                absl::FormatDuration(
                                    absl::Trunc(job.not_before - now_ + absl::Milliseconds(99),
                                                absl::Milliseconds(100)))));
      return;
    }
    // What could not start on the whole cluster, idle, waits for machines and holds nobody back.
    if (TotalSlots(job.device) < job.ranks) {
      Explain(job, WhyNot(job));
      return;
    }
    const auto blocker = blocked_by_.find(job.queue);
    if (policy_.strict_fifo && blocker != blocked_by_.end()) {
      Explain(job,
              absl::StrCat("waits behind job ", blocker->second.name, " (priority ",
                           blocker->second.priority, ", needs ",
                           Count(blocker->second.ranks, KindName(blocker->second.device) + " slot"),
                           ") in queue ", job.queue, "; starts before it with a priority above ",
                           blocker->second.priority));
      return;
    }
    std::vector<int> free;
    for (const WorkerView& worker : cluster_.workers) free.push_back(FreeSlots(worker, job.device));
    const std::vector<size_t> workers = ChooseWorkers(free, job.ranks);
    if (workers.empty()) {
      blocked_by_.emplace(job.queue, job);
      Explain(job, WhyNot(job));
      return;
    }
    Place(job, workers);
  }

  int64_t TotalSlots(v1::DeviceKind kind) const {
    int64_t total = 0;
    for (const WorkerView& worker : cluster_.workers) {
      for (const SlotView& slot : worker.slots) total += slot.kind == kind ? 1 : 0;
    }
    return total;
  }

  void Place(const WaitingJob& job, const std::vector<size_t>& workers) {
    Decision decision;
    decision.job = job.id;
    for (const size_t index : workers) {
      WorkerView& worker = cluster_.workers[index];
      for (SlotView& slot : worker.slots) {
        if (static_cast<int>(decision.placements.size()) == job.ranks) break;
        if (!slot.free || slot.kind != job.device) continue;
        slot.free = false;
        slot.held_by = job.name;
        v1::Placement placement;
        placement.set_rank(static_cast<int32_t>(decision.placements.size()));
        placement.set_worker(worker.id.value());
        placement.set_device(slot.device);
        decision.placements.push_back(std::move(placement));
      }
    }
    CHECK_EQ(static_cast<int>(decision.placements.size()), job.ranks) << job.id;
    schedule_.decisions.push_back(std::move(decision));
  }

  void Explain(const WaitingJob& job, std::string text) {
    schedule_.explanations.push_back({job.id, std::move(text)});
  }

  std::string WhyNot(const WaitingJob& job) const {
    const std::string kind = KindName(job.device);
    int64_t total = 0, free = 0;
    std::map<std::string, int64_t> held;  // job name -> slots on ready workers
    std::vector<std::string> away;        // workers that take nothing
    int64_t away_slots = 0;
    for (const WorkerView& worker : cluster_.workers) {
      int64_t here = 0;
      for (const SlotView& slot : worker.slots) {
        if (slot.kind != job.device) continue;
        ++here;
        if (worker.ready && !slot.free && !slot.held_by.empty()) ++held[slot.held_by];
      }
      total += here;
      free += FreeSlots(worker, job.device);
      if (!worker.ready && here > 0) {
        away_slots += here;
        away.push_back(absl::StrCat(worker.id.value(), " (", Count(here, "slot"), ") ",
                                    worker.unready_reason));
      }
    }
    if (cluster_.workers.empty()) {
      return absl::StrCat("needs ", Count(job.ranks, kind + " slot"),
                          ", but no worker has joined; start muster-worker");
    }
    if (total < job.ranks) {
      return absl::StrCat("no worker set could ever hold ", Count(job.ranks, kind + " slot"),
                          ": the cluster has ", total, "; add ", Count(job.ranks - total, "slot"),
                          total > 0
                              ? absl::StrCat(" or lower resources.ranks to ", total)
                              : absl::StrCat(" of kind ", kind, " or change resources.device"));
    }
    const std::string numbers = absl::StrCat("needs ", Count(job.ranks, kind + " slot"), ", ", free,
                                             free == 1 ? " is" : " are", " free of ", total);
    return absl::StrCat(numbers, "; ", CheapestChange(job.ranks - free, held, away, away_slots));
  }

  // The fewest jobs whose end frees `missing` slots: one that suffices, the smallest such; else the
  // largest first. Workers that are away come last, since nobody knows when they return.
  static std::string CheapestChange(int64_t missing, const std::map<std::string, int64_t>& held,
                                    const std::vector<std::string>& away, int64_t away_slots) {
    std::vector<std::pair<int64_t, std::string>> jobs;  // most slots first, then by name
    for (const auto& [name, slots] : held) jobs.emplace_back(-slots, name);
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
    if (missing > 0 && away_slots > 0) {
      absl::StrAppend(&text, text.empty() ? "starts when " : " and when ",
                      "workers that are away return: ", absl::StrJoin(away, ", "));
    }
    if (text.empty()) text = "starts when the slots of ended attempts are released";
    return text;
  }

  ClusterView cluster_;  // a copy: decisions take slots from it
  const SchedulePolicy& policy_;
  const absl::Time now_;
  std::map<std::string, WaitingJob> blocked_by_;  // queue -> first job that does not fit
  Schedule schedule_;
};

}  // namespace

Schedule Plan(const ClusterView& cluster, const std::vector<WaitingJob>& queue,
              const SchedulePolicy& policy, absl::Time now) {
  return Planner(cluster, policy, now).Run(queue);
}

}  // namespace muster::coordinator
