// Where workers are: the domains of the cluster's topology, and how far apart two places are.
#ifndef MUSTER_COORDINATOR_SCHEDULER_TOPOLOGY_H_
#define MUSTER_COORDINATOR_SCHEDULER_TOPOLOGY_H_

#include <array>
#include <cstddef>
#include <map>
#include <string>

#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

// The levels that have named domains, from the broadest. Below them is the host, which is a worker,
// above them the cluster.
inline constexpr std::array<v1::TopologyLevel, 4> kDomainLevels = {
    v1::TOPOLOGY_LEVEL_ZONE, v1::TOPOLOGY_LEVEL_BLOCK, v1::TOPOLOGY_LEVEL_RACK,
    v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN};

// The index of a level in kDomainLevels; 4 for a host. Requires: not the cluster.
constexpr size_t DepthOf(v1::TopologyLevel level) {
  return static_cast<size_t>(v1::TOPOLOGY_LEVEL_ZONE - level);
}

// The domains of a worker. An empty name: nothing says in which domain of that level it is, so that
// it is one of its own. Two workers are in the same domain of a level when their names agree down
// to that level: rack 7 of zone a is not rack 7 of zone b.
struct DomainPath {
  std::array<std::string, kDomainLevels.size()> names;  // as kDomainLevels

  friend auto operator<=>(const DomainPath&, const DomainPath&) = default;

  const std::string& name(v1::TopologyLevel level) const { return names[DepthOf(level)]; }
  // The same down to `depth` names, nothing below.
  DomainPath Above(size_t depth) const {
    DomainPath out = *this;
    for (size_t i = depth; i < names.size(); ++i) out.names[i].clear();
    return out;
  }
};

// Which domains workers are in: those of a file, else what their labels say.
struct TopologyRules {
  // By depth in kDomainLevels: the name of the label of workers that names their domain.
  std::array<std::string, kDomainLevels.size()> labels = {"zone", "block", "rack", "nvlink-domain"};
  // Of workers that the coordinator's topology file lists; their labels do not count.
  std::map<std::string, DomainPath> workers = {};

  DomainPath PathOf(const v1::Worker& worker) const;
};

// The level of the narrowest domain that has both workers, which are different ones.
v1::TopologyLevel CommonLevel(const DomainPath& a, const DomainPath& b);

// What a byte costs over a hop whose ends are in one domain of this level and in no narrower one,
// relative to a hop inside one worker: about the ratio of the bandwidths of NVLink and of networks
// that are oversubscribed towards the top.
constexpr double DistanceOf(v1::TopologyLevel level) {
  switch (level) {
    case v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN:
      return 2;
    case v1::TOPOLOGY_LEVEL_RACK:
      return 8;
    case v1::TOPOLOGY_LEVEL_BLOCK:
      return 12;
    case v1::TOPOLOGY_LEVEL_ZONE:
      return 24;
    case v1::TOPOLOGY_LEVEL_CLUSTER:
      return 48;
    default:
      return 1;
  }
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_TOPOLOGY_H_
