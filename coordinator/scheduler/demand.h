// What a gang asks of the topology, in the terms in which slots are searched.
#ifndef MUSTER_COORDINATOR_SCHEDULER_DEMAND_H_
#define MUSTER_COORDINATOR_SCHEDULER_DEMAND_H_

#include <cstdint>
#include <vector>

#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/topology.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

// Domains by depth: the index in kDomainLevels, kHostDepth for a worker, -1 for the cluster.
constexpr int kHostDepth = static_cast<int>(kDomainLevels.size());
constexpr int kClusterDepth = -1;

constexpr int Depth(v1::TopologyLevel level) {
  return level == v1::TOPOLOGY_LEVEL_CLUSTER ? kClusterDepth : static_cast<int>(DepthOf(level));
}
constexpr v1::TopologyLevel LevelAt(int depth) {
  return depth == kClusterDepth ? v1::TOPOLOGY_LEVEL_CLUSTER
         : depth == kHostDepth  ? v1::TOPOLOGY_LEVEL_HOST
                                : kDomainLevels[static_cast<size_t>(depth)];
}

// Runs of `size` ranks are each in one domain at least as deep as `depth`.
struct Granule {
  int depth = kHostDepth;
  int64_t size = 1;
};

// What a job asks of the topology.
struct Demand {
  SlotsFor slots;
  int64_t ranks = 0;
  std::vector<Granule> granules;  // each size is a multiple of the one before
  int start = kHostDepth;         // the narrowest domains that are looked at
  int limit = kClusterDepth;      // the broadest ones that may hold the gang
  int64_t unit() const { return granules.front().size; }
};

// `strict`: with what the job prefers as if it required it.
Demand DemandOf(const WaitingJob& job, const SlotIndex& index, bool strict);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_DEMAND_H_
