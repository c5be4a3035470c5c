#include "coordinator/scheduler/replacement.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "base/check.h"
#include "coordinator/scheduler/demand.h"
#include "coordinator/scheduler/gang_layout.h"

namespace muster::coordinator {
namespace {

class Filling {
 public:
  Filling(const SlotIndex& index, const WaitingJob& job, const Demand& demand,
          const GangLayout& layout, const std::vector<v1::Placement>& placements,
          const std::set<int32_t>& ranks, const std::set<WorkerId>& excluded)
      : index_(index), slots_(demand.slots), excluded_(excluded) {
    if (demand.limit > kClusterDepth) granules_.push_back({demand.limit, demand.ranks});
    granules_.insert(granules_.end(), demand.granules.rbegin(), demand.granules.rend());
    if (granules_.back().depth < kHostDepth) granules_.push_back({kHostDepth, 1});
    for (int32_t position = 0; position < job.ranks; ++position) {
      const int32_t rank = layout.RankAt(position);
      const bool moves = ranks.contains(rank);
      missing_.push_back(moves);
      at_.push_back(moves ? WorkerId() : WorkerId(placements[static_cast<size_t>(rank)].worker()));
    }
    peers_.resize(at_.size());
    for (const AxisTraffic& axis : layout.axes()) {
      layout.EachHop(axis, [&](int32_t from, int32_t to) {
        if (missing_[static_cast<size_t>(from)]) Peers(from).emplace_back(to, axis.bytes);
        if (missing_[static_cast<size_t>(to)]) Peers(to).emplace_back(from, axis.bytes);
      });
    }
  }

  // False: the free slots do not suffice.
  bool Run() { return Fill(0, static_cast<int64_t>(at_.size()), 0); }
  const WorkerId& At(int32_t position) const { return at_[static_cast<size_t>(position)]; }

 private:
  using Positions = std::vector<int64_t>;
  // What is placed has to be in the domain of this worker at least as deep as `depth`.
  struct Bound {
    int depth;
    WorkerId worker;
  };

  std::vector<std::pair<int32_t, double>>& Peers(int32_t position) {
    return peers_[static_cast<size_t>(position)];
  }
  bool Placed(int64_t position) const {
    return !at_[static_cast<size_t>(position)].value().empty();
  }
  static const DomainPath& PathOf(const WorkerView* worker) {
    static const auto* const nowhere = new DomainPath();
    return worker == nullptr ? *nowhere : worker->path;
  }
  v1::TopologyLevel Common(const WorkerId& a, const WorkerId& b) const {
    return a == b ? v1::TOPOLOGY_LEVEL_HOST
                  : CommonLevel(PathOf(index_.Find(a)), PathOf(index_.Find(b)));
  }
  bool Within(const Bound& bound, const WorkerId& worker) const {
    return Depth(Common(bound.worker, worker)) >= bound.depth;
  }

  bool Fill(int64_t first, int64_t size, size_t level) {
    const Granule& granule = granules_[level];
    for (int64_t at = first; at < first + size; at += granule.size) {
      if (!FillPart(at, level)) return false;
    }
    return true;
  }

  // A run of positions that has to be in one domain.
  bool FillPart(int64_t first, size_t level) {
    const Granule& granule = granules_[level];
    Positions open;
    std::optional<WorkerId> anchor;
    for (int64_t at = first; at < first + granule.size; ++at) {
      if (!Placed(at)) {
        open.push_back(at);
      } else if (!anchor.has_value()) {
        anchor = at_[static_cast<size_t>(at)];
      }
    }
    if (open.empty()) return true;
    if (granule.depth == kHostDepth) return Take(open, anchor);
    if (anchor.has_value()) {
      bounds_.push_back({granule.depth, *anchor});
      const bool filled = Fill(first, granule.size, level + 1);
      bounds_.pop_back();
      return filled;
    }
    std::vector<Bound> tried;
    for (const WorkerId& worker : Candidates({open.front()})) {
      const bool again = std::any_of(tried.begin(), tried.end(),
                                     [&](const Bound& bound) { return Within(bound, worker); });
      if (again) continue;
      tried.push_back({granule.depth, worker});
      bounds_.push_back(tried.back());
      const bool filled = Fill(first, granule.size, level + 1);
      bounds_.pop_back();
      if (filled) return true;
      for (const int64_t position : open) Release(position);
    }
    return false;
  }

  bool Take(const Positions& open, const std::optional<WorkerId>& anchor) {
    const std::vector<WorkerId> candidates = Candidates(open);
    const auto chosen = anchor.has_value()
                            ? std::find(candidates.begin(), candidates.end(), *anchor)
                            : candidates.begin();
    if (chosen == candidates.end()) return false;
    for (const int64_t position : open) at_[static_cast<size_t>(position)] = *chosen;
    taken_[*chosen] += static_cast<int>(open.size());
    return true;
  }
  void Release(int64_t position) {
    if (!Placed(position)) return;
    --taken_[at_[static_cast<size_t>(position)]];
    at_[static_cast<size_t>(position)] = WorkerId();
  }

  // The workers that may hold all of these positions, the best one first.
  std::vector<WorkerId> Candidates(const Positions& open) const {
    std::vector<std::tuple<double, int, WorkerId>> found;
    const auto& by_free = index_.RoomOf(slots_).workers_by_free;
    const int wanted = static_cast<int>(open.size());
    for (auto free = by_free.lower_bound(wanted); free != by_free.end(); ++free) {
      for (const WorkerView* view : free->second) {
        const WorkerId& worker = view->id;
        const auto taken = taken_.find(worker);
        const int left = free->first - (taken == taken_.end() ? 0 : taken->second);
        if (left < wanted || excluded_.contains(worker)) continue;
        if (std::any_of(bounds_.begin(), bounds_.end(),
                        [&](const Bound& bound) { return !Within(bound, worker); })) {
          continue;
        }
        found.emplace_back(CostAt(open, worker), left, worker);
      }
    }
    std::sort(found.begin(), found.end());
    std::vector<WorkerId> workers;
    for (auto& [cost, left, worker] : found) workers.push_back(std::move(worker));
    return workers;
  }

  double CostAt(const Positions& open, const WorkerId& worker) const {
    double cost = 0;
    for (const int64_t position : open) {
      for (const auto& [peer, bytes] : peers_[static_cast<size_t>(position)]) {
        if (Placed(peer)) cost += bytes * DistanceOf(Common(worker, At(peer)));
      }
    }
    return cost;
  }

  const SlotIndex& index_;
  const SlotsFor slots_;
  const std::set<WorkerId>& excluded_;
  std::vector<Granule> granules_;  // the broadest first; the last is of hosts
  std::vector<WorkerId> at_;       // by position; empty: not placed
  std::vector<bool> missing_;      // by position: it moves
  std::vector<std::vector<std::pair<int32_t, double>>> peers_;  // of those that move, with bytes
  std::map<WorkerId, int> taken_;                               // slots, by worker
  std::vector<Bound> bounds_;  // of the parts that are being filled
};

// Holds what is left of devices that the gang shares, of which it gets no second part.
const JobId& RestHolder() {
  static const auto* const id = new JobId("(rest)");  // no job has such an id
  return *id;
}

}  // namespace

std::optional<std::vector<v1::Placement>> PlaceReplacements(
    SlotIndex::Trial& trial, const WaitingJob& job, const std::vector<v1::Placement>& placements,
    const std::set<int32_t>& ranks, const std::set<WorkerId>& excluded) {
  CHECK_EQ(placements.size(), static_cast<size_t>(job.ranks)) << job.id;
  if (!job.reservations.empty()) trial.Open(job.reservations);
  const SlotIndex& index = trial.index();
  const Demand demand = DemandOf(job, index, /*strict=*/false);
  const int unit =
      demand.granules.front().depth == kHostDepth ? static_cast<int>(demand.unit()) : 1;
  const GangLayout layout(job, /*by_group=*/demand.unit() > 1);
  SlotIndex::Trial rest(trial);
  rest.TakeRest(job.id, RestHolder());
  Filling filling(index, job, demand, layout, placements, ranks, excluded);
  std::optional<std::vector<v1::Placement>> out;
  if (filling.Run()) {
    std::map<WorkerId, std::vector<int32_t>> by_worker;  // in the order of positions
    for (int32_t position = 0; position < job.ranks; ++position) {
      const int32_t rank = layout.RankAt(position);
      if (ranks.contains(rank)) by_worker[filling.At(position)].push_back(rank);
    }
    std::map<int32_t, v1::Placement> by_rank;
    for (const auto& [worker, here] : by_worker) {
      std::vector<std::string> devices =
          trial.Take(worker, demand.slots, static_cast<int>(here.size()), job.id, unit);
      CHECK_EQ(devices.size(), here.size()) << job.id << " on " << worker;
      for (size_t i = 0; i < here.size(); ++i) {
        v1::Placement& placement = by_rank[here[i]];
        placement.set_rank(here[i]);
        placement.set_worker(worker.value());
        placement.set_device(std::move(devices[i]));
      }
    }
    out.emplace();
    for (auto& [rank, placement] : by_rank) out->push_back(std::move(placement));
  }
  if (!job.reservations.empty()) trial.Close();
  return out;
}

}  // namespace muster::coordinator
