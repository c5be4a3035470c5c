// Which workers are to be avoided, by the attempts that ended for causes of their own and by ranks
// that were slow there.
#ifndef MUSTER_COORDINATOR_CORE_REPUTATION_H_
#define MUSTER_COORDINATOR_CORE_REPUTATION_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "coordinator/scheduler/queue_tree.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// What a worker, or one of its devices, did to an attempt.
struct Fault {
  v1::Cause cause = v1::CAUSE_UNKNOWN;
  std::string job_name = {};
  std::string job_id = {};
  std::string device = {};  // empty: not known, or of the worker as a whole
  double weight = 1;        // 1/2: another worker may as well be the reason
  // WorkerFault.slowdown and rank: no attempt ended, and `cause` counts for nothing.
  double slowdown = 0;
  int32_t rank = 0;
};

// Nothing else changes Worker.reputation. Faults count less and less; the standing that follows
// from them is stored, and changes in turns of its own, so that a plan depends on rows alone. A
// worker of a bad standing has a deadline at which it will be better. Thread: the core's. The
// functions work on `tree`'s ReputationPolicy.
namespace reputation {

void Note(WorkerEntry& worker, const Fault& fault, const QueueTree& tree, WorkerTable& workers,
          Deadlines& deadlines, Turn& turn);
// Sets the deadline of a worker after a restart.
void Recover(const WorkerEntry& worker, const QueueTree& tree, Deadlines& deadlines);
// Brings the standing up to date, and sets the next deadline. To be called when that is due, and
// for every worker after a change of the policy.
void Review(WorkerEntry& worker, const QueueTree& tree, WorkerTable& workers, Deadlines& deadlines,
            Turn& turn);
// Nothing changes for a worker without faults.
void Forgive(WorkerEntry& worker, WorkerTable& workers, Deadlines& deadlines, Turn& turn);

// What is left of faults after this time. Pure.
double Decayed(double faults, absl::Duration time, absl::Duration half_life);

}  // namespace reputation

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_REPUTATION_H_
