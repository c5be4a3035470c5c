#include "coordinator/scheduler/placement.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "base/check.h"

namespace muster::coordinator {
namespace {

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

}  // namespace

int64_t GroupsIn(const SlotIndex::Kind& slots, int group) {
  int64_t groups = 0;
  for (const auto& [size, workers] : slots.workers_by_total) {
    groups += static_cast<int64_t>(size / group) * workers;
  }
  return groups;
}

int UnitOf(const WaitingJob& job, const SlotIndex::Kind& slots) {
  const int largest = slots.workers_by_total.empty() ? 0 : slots.workers_by_total.rbegin()->first;
  return job.group <= largest && job.ranks % job.group == 0 ? job.group : 1;
}

bool CouldFit(const WaitingJob& job, const SlotIndex::Kind& slots) {
  const int group = UnitOf(job, slots);
  return slots.total >= job.ranks && GroupsIn(slots, group) >= job.ranks / group;
}

std::optional<std::vector<v1::Placement>> PlaceGang(SlotIndex::Trial& trial,
                                                    const WaitingJob& job) {
  const SlotIndex& index = trial.index();
  const SlotIndex::Kind& slots = index.Of(job.device);
  if (slots.free < job.ranks) return std::nullopt;
  const int group = UnitOf(job, slots);
  const std::vector<WorkerId> workers = ChooseWorkers(slots, group, job.ranks / group);
  if (workers.empty()) return std::nullopt;
  std::vector<v1::Placement> placements(static_cast<size_t>(job.ranks));
  std::vector<int32_t> order = RanksByGroup(job);
  // Groups cannot be kept whole: ranks take slots in the order of their numbers.
  if (group == 1) std::sort(order.begin(), order.end());
  size_t next = 0;
  for (const WorkerId& id : workers) {
    const int whole = FreeSlots(*index.Find(id), job.device) / group * group;
    const int here = std::min(whole, static_cast<int>(order.size() - next));
    for (std::string& device : trial.Take(id, job.device, here, job.id)) {
      const int32_t rank = order[next++];
      v1::Placement& placement = placements[static_cast<size_t>(rank)];
      placement.set_rank(rank);
      placement.set_worker(id.value());
      placement.set_device(std::move(device));
    }
  }
  CHECK_EQ(next, order.size()) << job.id;
  return placements;
}

}  // namespace muster::coordinator
