// Makes plans, and carries out what they decide.
#ifndef MUSTER_COORDINATOR_CORE_DECISIONS_H_
#define MUSTER_COORDINATOR_CORE_DECISIONS_H_

#include "coordinator/core/attempts.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/job_life.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/slot_keeper.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "coordinator/scheduler/scheduler.h"

namespace muster::coordinator {

// Records of every plan that decides something what it was made from (plan_record.h), before any
// of it is carried out, and sets the deadline of the next one. Thread: the core's. What it is made
// of outlives it.
class Decisions {
 public:
  Decisions(JobTable& jobs, const WorkerTable& workers, Scheduling& scheduling,
            Deadlines& deadlines, JobStates& states, SlotKeeper& kept, Attempts& attempts,
            JobLife& life)
      : jobs_(jobs),
        workers_(workers),
        scheduling_(scheduling),
        deadlines_(deadlines),
        states_(states),
        kept_(kept),
        attempts_(attempts),
        life_(life) {}

  void Schedule(Turn& turn);

 private:
  void CarryOut(const Start& start, Turn& turn);
  void CarryOut(const Preempt& preempt, Turn& turn);
  void CarryOut(const Resize& resize, Turn& turn);
  // Nothing is durable of it: the next plan says it again.
  void CarryOut(const Reserve& reserve, Turn&) { scheduling_.SetAside(reserve); }
  void CarryOut(const GiveUpKept& give_up, Turn& turn);

  JobTable& jobs_;
  const WorkerTable& workers_;
  Scheduling& scheduling_;
  Deadlines& deadlines_;
  JobStates& states_;
  SlotKeeper& kept_;
  Attempts& attempts_;
  JobLife& life_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DECISIONS_H_
