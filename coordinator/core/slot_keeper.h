// Slots that are kept for jobs that will start or go on with them.
#ifndef MUSTER_COORDINATOR_CORE_SLOT_KEEPER_H_
#define MUSTER_COORDINATOR_CORE_SLOT_KEEPER_H_

#include <string>
#include <vector>

#include "coordinator/core/jobs.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

// Nothing else changes StateRow.kept, and what workers and the scheduler know of it is the same.
// Thread: the core's. What it is made of outlives it.
class SlotKeeper {
 public:
  SlotKeeper(WorkerTable& workers, Scheduling& scheduling)
      : workers_(workers), scheduling_(scheduling) {}

  // Keeps slots for the job. Requires: none are kept for it.
  void Keep(JobEntry& job, const std::vector<Slot>& slots);
  // The slots that are kept for the job, if any, are free again.
  void Drop(JobEntry& job, Turn& turn);
  // Takes over what is stored of slots kept for a job that waits; those on workers that are gone
  // are given up by the next plan.
  void Recover(const JobEntry& job);
  // Adds what does not hold of the invariant.
  void Check(const JobTable& all, std::vector<std::string>& broken) const;

 private:
  WorkerTable& workers_;
  Scheduling& scheduling_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_SLOT_KEEPER_H_
