// The states of jobs, and what those wait for that have no attempt.
#ifndef MUSTER_COORDINATOR_CORE_JOB_STATES_H_
#define MUSTER_COORDINATOR_CORE_JOB_STATES_H_

#include <string>

#include "coordinator/core/deadlines.h"
#include "coordinator/core/dependencies.h"
#include "coordinator/core/job_machine.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Nothing else changes StateRow.state of a job that was accepted. Between turns a live job without
// an attempt waits in `scheduling`, unless it is held, waits for the end of others or for its turn
// in its array. Thread: the core's. What it is made of outlives it.
class JobStates {
 public:
  JobStates(JobTable& jobs, Scheduling& scheduling, const Reservations& reservations,
            Deadlines& deadlines)
      : jobs_(jobs), scheduling_(scheduling), reservations_(reservations), deadlines_(deadlines) {}

  // Requires: the state has a transition by this event.
  void Transition(JobEntry& job, JobEvent event, const std::string& why, Turn& turn);
  // Adds the job to those that wait, where it stays until an attempt of it is allocated.
  void Wait(JobEntry& job, Turn& turn);
  // Lets the job wait for the ends in StateRow.after.
  void AwaitDependencies(JobEntry& job, Turn& turn);
  // Lets jobs wait for devices, or fail, that waited for those that have ended in this turn.
  void ResolveDependents(Turn& turn);
  // Lets tasks wait for devices in place of those that have left their arrays.
  void AdmitTasks(Turn& turn);
  // Whether one of the two has something to do.
  bool pending() const { return dependents_.pending() || jobs_.arrays().pending(); }
  // Looks again at what jobs may take.
  void ReservationsChanged(Turn& turn);

  // Why the job waits.
  static void Explain(JobEntry& job, v1::WaitReason reason, Turn& turn);
  static v1::WaitReason HeldReason(const JobEntry& job);

 private:
  static v1::WaitReason WaitForTurn(const JobEntry& job);

  JobTable& jobs_;
  Scheduling& scheduling_;
  const Reservations& reservations_;
  Deadlines& deadlines_;
  Dependents dependents_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOB_STATES_H_
