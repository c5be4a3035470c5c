#include "coordinator/scheduler/topology.h"

namespace muster::coordinator {

DomainPath TopologyRules::PathOf(const v1::Worker& worker) const {
  if (const auto listed = workers.find(worker.name()); listed != workers.end()) {
    return listed->second;
  }
  DomainPath path;
  for (size_t depth = 0; depth < labels.size(); ++depth) {
    const auto label = worker.labels().find(labels[depth]);
    if (label != worker.labels().end()) path.names[depth] = label->second;
  }
  return path;
}

v1::TopologyLevel CommonLevel(const DomainPath& a, const DomainPath& b) {
  v1::TopologyLevel common = v1::TOPOLOGY_LEVEL_CLUSTER;
  for (size_t depth = 0; depth < kDomainLevels.size(); ++depth) {
    if (a.names[depth] != b.names[depth]) break;
    if (!a.names[depth].empty()) common = kDomainLevels[depth];
  }
  return common;
}

}  // namespace muster::coordinator
