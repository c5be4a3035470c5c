// Clusters and gangs at random, and the cheapest placement by trying all, for tests and benchmarks
// of placement.
#ifndef MUSTER_TESTS_SUPPORT_RANDOM_CLUSTER_H_
#define MUSTER_TESTS_SUPPORT_RANDOM_CLUSTER_H_

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/rng.h"
#include "coordinator/scheduler/gang_layout.h"
#include "coordinator/scheduler/placement.h"
#include "coordinator/scheduler/slot_index.h"

namespace muster::coordinator::synthetic {

inline void AddWorker(SlotIndex& index, const std::string& name, int slots, DomainPath path = {},
                      int busy = 0) {
  WorkerView worker;
  worker.id = WorkerId(name);
  worker.ready = true;
  worker.path = std::move(path);
  for (int i = 0; i < slots; ++i) {
    SlotView slot;
    slot.device = absl::StrCat("cpu:", i);
    if (i < busy) slot.held_by = JobId("holder");
    worker.slots.push_back(slot);
  }
  index.Put(std::move(worker));
}

inline WaitingJob Gang(int ranks) {
  WaitingJob job;
  job.id = JobId("gang");
  job.name = "gang";
  job.queue = "default";
  job.ranks = ranks;
  job.submit_sequence = 1;
  return job;
}

// Workers of 8 slots: 16 in a rack, 8 racks in a block, 4 blocks in a zone.
inline void AddFleet(SlotIndex& index, int workers, int slots = 8) {
  for (int i = 0; i < workers; ++i) {
    DomainPath path;
    path.names = {absl::StrCat("z", i / 512), absl::StrCat("b", i / 128), absl::StrCat("r", i / 16),
                  ""};
    AddWorker(index, absl::StrFormat("w%05d", i), slots, path);
  }
}

// tensor 8, then data and pipeline.
inline WaitingJob MeshOf(int ranks, int number) {
  WaitingJob job = Gang(ranks);
  job.id = JobId(absl::StrCat("job-", number));
  job.name = job.id.value();
  job.submit_sequence = static_cast<uint64_t>(number) + 1;
  const int32_t tensor = std::min(8, ranks);
  const int32_t stages = ranks >= 256 ? 4 : 1;
  job.group = tensor;
  job.traffic = {
      {v1::MESH_AXIS_TENSOR, tensor, 1, WeightOf(v1::MESH_AXIS_TENSOR)},
      {v1::MESH_AXIS_DATA, ranks / tensor / stages, tensor, WeightOf(v1::MESH_AXIS_DATA)},
      {v1::MESH_AXIS_PIPELINE, stages, ranks / stages, WeightOf(v1::MESH_AXIS_PIPELINE)}};
  return job;
}

inline DomainPath RandomPath(Rng& rng) {
  DomainPath path;
  for (std::string& name : path.names) {
    if (rng.Chance(0.7)) name = absl::StrCat("d", rng.Below(2));
  }
  return path;
}

// Up to 7 workers of 1 to 6 slots in zones, blocks, racks and NVLink domains.
inline SlotIndex RandomCluster(Rng& rng) {
  SlotIndex index;
  const int workers = 1 + static_cast<int>(rng.Below(7));
  for (int i = 0; i < workers; ++i) {
    const int slots = 1 + static_cast<int>(rng.Below(6));
    AddWorker(index, absl::StrCat("w", i), slots, RandomPath(rng),
              static_cast<int>(rng.Below(static_cast<uint64_t>(slots) + 1)));
  }
  return index;
}

// A gang with rules that a spec may have.
inline WaitingJob RandomGang(Rng& rng) {
  const int group = 1 + static_cast<int>(rng.Below(3));
  const int parts = 1 + static_cast<int>(rng.Below(2));
  const int segment = group * (1 + static_cast<int>(rng.Below(2)));
  WaitingJob job = Gang(segment * parts);
  job.group = group;
  const auto level = [&rng] { return static_cast<v1::TopologyLevel>(1 + rng.Below(6)); };
  if (rng.Chance(0.6)) job.placement.required = level();
  if (job.placement.required == v1::TOPOLOGY_LEVEL_UNSPECIFIED && rng.Chance(0.3)) {
    job.placement.preferred = level();
  }
  const v1::TopologyLevel within = std::max(job.placement.required, job.placement.preferred);
  if (within != v1::TOPOLOGY_LEVEL_UNSPECIFIED && parts > 1 && rng.Chance(0.4)) {
    job.placement.segment = segment;
    if (rng.Chance(0.3) && within != v1::TOPOLOGY_LEVEL_CLUSTER) job.placement.spread = within;
  } else if (rng.Chance(0.3)) {
    const v1::TopologyLevel spread = static_cast<v1::TopologyLevel>(1 + rng.Below(5));
    if (within == v1::TOPOLOGY_LEVEL_UNSPECIFIED || spread < within) job.placement.spread = spread;
  }
  return job;
}

// At most 8 tensor groups along three axes.
inline WaitingJob RandomMesh(Rng& rng) {
  const int32_t tensor = 1 + static_cast<int32_t>(rng.Below(2));
  const std::vector<std::array<int32_t, 3>> shapes = {
      {1, 2, 1}, {1, 3, 1}, {1, 4, 1}, {1, 2, 2}, {2, 2, 1}, {1, 2, 3}, {1, 3, 2},
      {1, 6, 1}, {2, 2, 2}, {1, 4, 2}, {1, 2, 4}, {1, 8, 1}, {1, 5, 1}, {1, 7, 1}};
  const auto& shape = shapes[rng.Below(shapes.size())];
  WaitingJob job = Gang(tensor * shape[0] * shape[1] * shape[2]);
  job.group = tensor;
  int32_t stride = 1;
  const auto add = [&](v1::MeshAxis axis, int32_t degree) {
    if (degree > 1) job.traffic.push_back({axis, degree, stride, WeightOf(axis)});
    stride *= degree;
  };
  add(v1::MESH_AXIS_TENSOR, tensor);
  add(v1::MESH_AXIS_CONTEXT, shape[0]);
  add(v1::MESH_AXIS_DATA, shape[1]);
  add(v1::MESH_AXIS_PIPELINE, shape[2]);
  return job;
}

// Tries every assignment of tensor groups to the workers of one domain.
class Exhaustion {
 public:
  Exhaustion(const SlotIndex& index, const WaitingJob& job, std::vector<WorkerId> workers)
      : unit_(UnitOf(job, index.Of(job.device))), layout_(job, unit_ > 1 || job.group == 1) {
    for (const WorkerId& id : workers) {
      const int units = FreeSlots(*index.Find(id), job.device) / unit_;
      if (units == 0) continue;
      left_.push_back(units);
      names_.push_back(id);
    }
    const size_t count = names_.size();
    distance_.resize(count * count);
    for (size_t a = 0; a < count; ++a) {
      for (size_t b = 0; b < count; ++b) {
        distance_[a * count + b] = DistanceOf(
            a == b ? v1::TOPOLOGY_LEVEL_HOST
                   : CommonLevel(index.Find(names_[a])->path, index.Find(names_[b])->path));
      }
    }
    const int units = job.ranks / unit_;
    earlier_.resize(static_cast<size_t>(units));
    for (const AxisTraffic& axis : layout_.axes()) {
      layout_.EachHop(axis, [&](int32_t from, int32_t to) {
        const int a = from / unit_, b = to / unit_;
        if (a == b) {
          inside_ += axis.bytes;
        } else {
          earlier_[static_cast<size_t>(std::max(a, b))][std::min(a, b)] += axis.bytes;
        }
      });
    }
    at_.resize(static_cast<size_t>(units));
    ranks_ = job.ranks;
  }
  // The least cost below `bound`, else `bound`.
  double Run(double bound) {
    best_ = bound * ranks_;
    Try(0, inside_);
    return best_ / ranks_;
  }

 private:
  void Try(size_t unit, double cost) {
    if (cost >= best_ * (1 - 1e-12)) return;
    if (unit == at_.size()) {
      best_ = cost;
      return;
    }
    for (size_t worker = 0; worker < left_.size(); ++worker) {
      if (left_[worker] == 0) continue;
      double more = 0;
      for (const auto& [peer, bytes] : earlier_[unit]) {
        more += bytes * distance_[worker * left_.size() + at_[static_cast<size_t>(peer)]];
      }
      --left_[worker];
      at_[unit] = worker;
      Try(unit + 1, cost + more);
      ++left_[worker];
    }
  }

  const int unit_;
  const GangLayout layout_;
  std::vector<WorkerId> names_;
  std::vector<int> left_;
  std::vector<double> distance_;
  std::vector<std::map<int, double>> earlier_;  // by unit: peers with lower numbers
  std::vector<size_t> at_;
  double inside_ = 0;
  double best_ = 0;
  int ranks_ = 0;
};

// The least cost of the gang in any domain of the narrowest level that holds it. `bound`: a cost
// that is known to be possible. Requires: no rules of placement.
inline double CheapestByExhaustion(const SlotIndex& index, const WaitingJob& job, double bound) {
  const int unit = UnitOf(job, index.Of(job.device));
  for (int level = v1::TOPOLOGY_LEVEL_HOST; level <= v1::TOPOLOGY_LEVEL_CLUSTER; ++level) {
    std::map<std::string, std::vector<WorkerId>> domains;
    for (const auto& [id, worker] : index.workers()) {
      if (level == v1::TOPOLOGY_LEVEL_HOST) {
        domains[id.value()].push_back(id);
      } else if (level == v1::TOPOLOGY_LEVEL_CLUSTER) {
        domains["cluster"].push_back(id);
      } else {
        const size_t depth = DepthOf(static_cast<v1::TopologyLevel>(level));
        if (worker.path.names[depth].empty()) continue;
        std::string key;
        for (const std::string& name : worker.path.Above(depth + 1).names) {
          absl::StrAppend(&key, name, "/");
        }
        domains[key].push_back(id);
      }
    }
    double best = -1;
    for (const auto& [key, workers] : domains) {
      int units = 0;
      for (const WorkerId& id : workers) units += FreeSlots(*index.Find(id), job.device) / unit;
      if (units < job.ranks / unit) continue;
      const double cost = Exhaustion(index, job, workers).Run(best < 0 ? bound * 1.001 : best);
      if (best < 0 || cost < best) best = cost;
    }
    if (best >= 0) return std::min(best, bound);
  }
  return -1;
}

}  // namespace muster::coordinator::synthetic

#endif  // MUSTER_TESTS_SUPPORT_RANDOM_CLUSTER_H_
