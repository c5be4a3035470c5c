// Which slots a gang takes.
#ifndef MUSTER_COORDINATOR_SCHEDULER_PLACEMENT_H_
#define MUSTER_COORDINATOR_SCHEDULER_PLACEMENT_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

// The number of whole groups of `group` slots that all workers together have.
int64_t GroupsIn(const SlotIndex::Kind& slots, int group);

// How many slots of one worker a job takes at a time: a tensor group, unless no worker is as large.
int UnitOf(const WaitingJob& job, const SlotIndex::Kind& slots);

// Whether the job would fit if every slot were free. `slots` are those of its kind.
bool CouldFit(const WaitingJob& job, const SlotIndex::Kind& slots);

// Takes free slots for the whole gang, or none. A gang takes the fewest workers that can hold it.
// They are chosen one by one: always the one with the fewest free slots with which the gang still
// fits on that many workers (best fit, so that the slots left over stay together). Slots are taken
// by whole tensor groups (WaitingJob::group), which span workers only if no worker of the cluster
// is as large as one. Ranks take slots worker by worker in order of id, then in device order,
// tensor group by tensor group. Returns where ranks 0 to ranks - 1 are placed, in this order. Pure.
// O(workers taken x different numbers of free slots + slots taken).
std::optional<std::vector<v1::Placement>> PlaceGang(SlotIndex::Trial& trial, const WaitingJob& job);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_PLACEMENT_H_
