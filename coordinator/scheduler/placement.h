// Which slots a gang takes.
#ifndef MUSTER_COORDINATOR_SCHEDULER_PLACEMENT_H_
#define MUSTER_COORDINATOR_SCHEDULER_PLACEMENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/scheduler/slot_index.h"
#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/schedule.pb.h"

namespace muster::coordinator {

// The number of whole groups of `group` slots that ranks of this share could get if all were free.
int64_t GroupsIn(const SlotIndex::Kind& slots, int group, int32_t share);

// The slots that ranks of the job could get if all were free.
int64_t TotalFor(const WaitingJob& job, const SlotIndex::Kind& slots);

// How many slots of one worker a job takes at a time: a tensor group, unless no worker is as large.
int UnitOf(const WaitingJob& job, const SlotIndex::Kind& slots);

// The slots that ranks of the job can get.
inline SlotsFor SlotsWantedBy(const WaitingJob& job) { return {job.device, job.share}; }

// Whether the job would fit if every slot were free, within the domains that it requires.
bool CouldFit(const WaitingJob& job, const SlotIndex& index);

// Takes free slots for the whole gang, or none: it takes them exactly when there are any that keep
// the rules. Pure.
//
// Rules: a tensor group (WaitingJob::group) is on one worker, or in one NVLink domain where no
// worker is as large, or anywhere where no domain is; what PlacementRule requires is in one domain
// of that level.
//
// Choice: the narrowest level of which a domain holds the gang, no narrower than `preferred`. Of
// its domains the one where communication costs least (PlacementCost), then the fullest, then the
// first by name. Inside it, ranks of tensor groups, then of the axes in the order of the mesh, stay
// as close together as free slots allow. For that some ways to cut the gang are tried: over as few
// domains and workers as possible, always the least free one with which the gang still fits (best
// fit, so that what is left over stays together), or the freest; by the blocks of the mesh; and, of
// small gangs, what exchanges of groups improve.
//
// Workers of a bad record (WorkerView::standing): suspects are taken only where the gang does not
// fit without them, or costs less with them; those that are avoided only where it does not fit
// without them, and no more of them than that takes, or not at all where `last_resort` is false.
// With it, a gang that fits is placed.
//
// Of a job that shares its devices each rank takes one with room for it: a single rank the one of
// those that other jobs share already on which the least is left over; a gang such devices alone,
// where they are as close together as others would be.
//
// Returns where ranks 0 to ranks - 1 are placed, in this order. O(domains x different numbers of
// free slots + workers of the domain + ranks x axes) for each way that is tried.
std::optional<std::vector<v1::Placement>> PlaceGang(SlotIndex::Trial& trial, const WaitingJob& job,
                                                    bool last_resort = true);
// The same without names, by rank. The slots are those of the index.
std::optional<std::vector<SlotIndex::SlotRef>> TakeSlots(SlotIndex::Trial& trial,
                                                         const WaitingJob& job,
                                                         bool last_resort = true);
// Whether PlaceGang() would place it. Takes nothing.
bool FitsNow(SlotIndex::Trial& trial, const WaitingJob& job);

// What the communication of the job costs where its ranks are placed, by rank.
v1::PlacementCost CostOf(const SlotIndex& index, const WaitingJob& job,
                         const std::vector<v1::Placement>& placements);

// Where a gang would be that fits the free slots (or, with `ever`, all slots) but not the domains
// that it requires. No value: its domains are not what keeps it from starting.
struct DomainShortage {
  v1::TopologyLevel level = v1::TOPOLOGY_LEVEL_UNSPECIFIED;  // that it requires
  int32_t segment = 0;                                       // ranks that must be in one domain
  std::string domain;                                        // the one that holds most
  int64_t slots = 0;                                         // ranks of the job that it holds
  // Jobs whose end makes room in one domain that could hold them, with their slots there; of such
  // domains in the one that holds most now. Its number in the index, and of a single worker that
  // worker; -1 and null: no domain is open to the job.
  std::vector<std::pair<JobId, int64_t>> jobs;
  int opens = -1;
  const WorkerView* opens_worker = nullptr;
  // The narrowest level of which a domain would hold it.
  v1::TopologyLevel level_at_least = v1::TOPOLOGY_LEVEL_UNSPECIFIED;
};
std::optional<DomainShortage> FindDomainShortage(const WaitingJob& job, const SlotIndex& index,
                                                 bool ever);
// The worker is, or is in, the domain that is open to the job once `jobs` have ended.
bool OpensOn(const SlotIndex& index, const DomainShortage& shortage, const WorkerView& worker);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_PLACEMENT_H_
