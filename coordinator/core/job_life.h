// What becomes of jobs: by their users, by the ends of their attempts, and by their deadlines.
#ifndef MUSTER_COORDINATOR_CORE_JOB_LIFE_H_
#define MUSTER_COORDINATOR_CORE_JOB_LIFE_H_

#include <string>

#include "absl/status/status.h"
#include "coordinator/core/attempts.h"
#include "coordinator/core/core.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/slot_keeper.h"
#include "coordinator/core/turn.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Decides whether a job that has lost its attempt runs again: what counts against its budgets
// (StateRow.failures and restarts_in_a_row, which nothing else changes), how long it backs off, and
// who holds it. A live job with a deadline is looked at by then. Thread: the core's. What it
// is made of outlives it.
class JobLife {
 public:
  JobLife(JobTable& jobs, Scheduling& scheduling, const Reservations& reservations,
          Deadlines& deadlines, JobStates& states, SlotKeeper& kept, Attempts& attempts)
      : jobs_(jobs),
        scheduling_(scheduling),
        reservations_(reservations),
        deadlines_(deadlines),
        states_(states),
        kept_(kept),
        attempts_(attempts) {}

  // ---- users, who may change these jobs
  void Cancel(JobEntry& job, Turn& turn);
  // kInvalidArgument, kFailedPrecondition: the change, which then changes nothing.
  absl::Status Change(JobEntry& job, const ChangeJobEvent& event, Turn& turn);
  // Also whether the caller may; else nothing changes. kNotFound: the array. What single tasks
  // refuse is in the report.
  absl::Status ChangeArray(const ChangeArrayEvent& event, v1::ArrayReport& report, Turn& turn);

  // Asks the ranks to stop at the end of a step, with a checkpoint. Requires: the job is up.
  void Yield(JobEntry& job, const std::string& why, Turn& turn);
  // Ends the attempts whose ranks are accounted for, and lets their jobs go on. Nothing else does,
  // so that an attempt never ends while something looks at it.
  void EndReleasedAttempts(Turn& turn);
  // Ends a job whose deadline has passed, or sets its timer.
  void CheckDeadline(JobEntry& job, Turn& turn);

 private:
  void AfterRelease(JobEntry& job, const Attempts::Released& released, Turn& turn);
  // The attempt of a job that yielded is released.
  void AfterYield(JobEntry& job, Turn& turn);
  void AfterFailure(JobEntry& job, const v1::AttemptEnd& end, Turn& turn);
  absl::Status SetSize(JobEntry& job, const ChangeJobEvent& event, Turn& turn);
  absl::Status Suspend(JobEntry& job, const ChangeJobEvent& event, const std::string& why,
                       Turn& turn);
  // Requires: it has no attempt and held_by is set.
  void Hold(JobEntry& job, Turn& turn);
  void Unhold(JobEntry& job, const std::string& why, Turn& turn);
  absl::Status Requeue(JobEntry& job, const std::string& why, Turn& turn);

  JobTable& jobs_;
  Scheduling& scheduling_;
  const Reservations& reservations_;
  Deadlines& deadlines_;
  JobStates& states_;
  SlotKeeper& kept_;
  Attempts& attempts_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOB_LIFE_H_
