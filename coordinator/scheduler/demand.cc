#include "coordinator/scheduler/demand.h"

#include "coordinator/scheduler/placement.h"

namespace muster::coordinator {

Demand DemandOf(const WaitingJob& job, const SlotIndex& index, bool strict) {
  Demand demand;
  demand.slots = SlotsWantedBy(job);
  demand.ranks = job.ranks;
  const SlotIndex::Kind& slots = index.Of(job.device);
  Granule unit{kHostDepth, UnitOf(job, slots)};
  if (unit.size == 1 && job.group > 1 && job.ranks % job.group == 0) {
    for (const auto& [path, number] : index.domains_of(v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN)) {
      const auto here = index.domain(number).slots.find(job.device);
      if (here == index.domain(number).slots.end()) continue;
      if (here->second.Sum(job.share) >= job.group)
        unit = {Depth(v1::TOPOLOGY_LEVEL_NVLINK_DOMAIN), job.group};
    }
  }
  demand.granules.push_back(unit);
  const PlacementRule& rule = job.placement;
  const bool segments = rule.segment > 0 && rule.segment < job.ranks;
  if (rule.required != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
    if (segments) {
      demand.granules.push_back({Depth(rule.required), rule.segment});
    } else {
      demand.limit = Depth(rule.required);
    }
  }
  if (rule.preferred != v1::TOPOLOGY_LEVEL_UNSPECIFIED) {
    if (segments && strict) demand.granules.push_back({Depth(rule.preferred), rule.segment});
    if (!segments) demand.start = Depth(rule.preferred);
  }
  return demand;
}

}  // namespace muster::coordinator
