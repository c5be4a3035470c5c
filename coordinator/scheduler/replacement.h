// Which slots some ranks of a gang take while the others stay where they are.
#ifndef MUSTER_COORDINATOR_SCHEDULER_REPLACEMENT_H_
#define MUSTER_COORDINATOR_SCHEDULER_REPLACEMENT_H_

#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "base/ids.h"
#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

// Takes free slots for `ranks` of the gang, on workers that are not in `excluded`, or none. The
// other ranks stay at `placements`, which is by rank and has as many entries as job.ranks. Pure.
//
// Rules: those of PlaceGang, for the gang as it is afterwards: what a tensor group or segment has
// kept decides where the rest of it goes. Choice: part by part of the gang, the broadest domains
// first, each to the place where communication with the ranks that are placed costs least, then to
// the fullest worker, then to the first by name. A part that must be in one domain and has no rank
// left tries the domains in this order until one holds it.
//
// Returns where `ranks` are placed, ascending. O(workers with free slots x peers of `ranks`) for
// each part, times the domains that are tried.
std::optional<std::vector<v1::Placement>> PlaceReplacements(
    SlotIndex::Trial& trial, const WaitingJob& job, const std::vector<v1::Placement>& placements,
    const std::set<int32_t>& ranks, const std::set<WorkerId>& excluded);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_REPLACEMENT_H_
