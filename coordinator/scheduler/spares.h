// Devices that are kept free as replacements, for jobs that recover from a fault.
//
// Which ones these are is not stored: it follows from what is free now. While a plan is made, a
// holder of their own has them in the index, so that nothing else of the scheduler needs to know of
// them; a job that may take spares takes them from it.
#ifndef MUSTER_COORDINATOR_SCHEDULER_SPARES_H_
#define MUSTER_COORDINATOR_SCHEDULER_SPARES_H_

#include <cstdint>
#include <vector>

#include "base/ids.h"
#include "coordinator/scheduler/queue_tree.h"
#include "coordinator/scheduler/slot_index.h"
#include "muster/v1/queue.pb.h"

namespace muster::coordinator {

// Who holds spares in the index while a plan is made. No job has such an id.
const JobId& SpareHolder();

// Lets the holder take free slots in this trial, for every domain until it has as many as are to be
// kept free, or no free one is left. They are whole workers as far as possible, the freest that
// hold no more than are wanted, then the least free one for the rest; never of workers that are
// avoided, and of suspects last. Spares of narrower domains count for the broader one. Returns how
// many are missing, in all domains. Pure. O(domains of the levels + free workers in those that lack
// some).
int64_t HoldSpares(SlotIndex::Trial& trial, const QueueTree& tree);

// How many slots of a domain are to be kept free, at most those that it has: by number of the
// domain in the index.
std::vector<PerDevice<int64_t>> SparesWanted(const SlotIndex& index, const QueueTree& tree);

// What is kept free now, by level and kind as in the policy. O(HoldSpares).
std::vector<v1::SpareStatus> CountSpares(SlotIndex& index, const QueueTree& tree);
// Devices of any kind, in all domains together: those that are spares now, and those that are to be
// spares where no more are free.
struct SpareCount {
  int64_t free = 0;
  int64_t missing = 0;
};
SpareCount SpareDevices(SlotIndex& index, const QueueTree& tree);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SCHEDULER_SPARES_H_
