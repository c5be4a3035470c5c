// One attempt of a job, from its allocation to its release.
#ifndef MUSTER_COORDINATOR_CORE_ATTEMPTS_H_
#define MUSTER_COORDINATOR_CORE_ATTEMPTS_H_

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/core/attempt_machine.h"
#include "coordinator/core/core.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/identity.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/key_value.h"
#include "coordinator/core/membership.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/run_clock.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/stop_reason.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/worker_faults.h"
#include "coordinator/core/workers.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/session.pb.h"

namespace muster::coordinator {

// Nothing else changes StateRow.attempt_state and what is stored of attempts. A gang is all or
// nothing: each of its ranks holds a slot until the attempt is stopped and the rank is known to be
// gone. An attempt that is up has a deadline by which it must have got on. What its end means for
// the job is the caller's to carry out (Release). Thread: the core's. What it is made of outlives
// it.
class Attempts {
 public:
  struct Tables {
    JobTable& jobs;
    WorkerTable& workers;
    Scheduling& scheduling;
    const Reservations& reservations;
    KeyValue& values;
    Deadlines& deadlines;
  };
  Attempts(const CoreConfig& config, const Identity& identity, const Tables& tables,
           JobStates& states)
      : config_(config),
        identity_(identity),
        jobs_(tables.jobs),
        workers_(tables.workers),
        scheduling_(tables.scheduling),
        reservations_(tables.reservations),
        values_(tables.values),
        deadlines_(tables.deadlines),
        states_(states) {}

  // ---- after a restart
  // Takes over the slots that the attempt holds. kDataLoss: one is on an unknown worker. Requires:
  // the job has an attempt; so does the next one.
  absl::Status Recover(const JobEntry& job);
  // Its deadlines are due.
  void Resume(JobEntry& job, Turn& turn);

  // ---- the beginning, and what ends it
  // Requires: the job waits no more, has no attempt, and the slots are free.
  void Allocate(JobEntry& job, const std::vector<v1::Placement>& placements, Turn& turn);
  // Requires: the job is up.
  void Stop(JobEntry& job, const StopReason& reason, Turn& turn);
  // Gives the ranks on the worker other slots where that is possible, and else stops the attempt.
  // Requires: the job is up, and the worker has ranks of it.
  void ReplaceOrStop(JobEntry& job, const std::string& worker, const StopReason& reason,
                     Departure departure, Turn& turn);

  // ---- what daemons report
  // Whether the report is about the ranks that the attempt has now. Takes one about ranks that were
  // replaced, and stops an attempt of which a daemon knows more than this coordinator.
  bool IsOfMembership(JobEntry& job, const std::string& worker, const v1::ObservedAttempt& observed,
                      Turn& turn);
  void ApplyRank(JobEntry& job, const std::string& worker, const v1::ObservedRank& rank,
                 Turn& turn);
  // Takes the attempt through as many states as the states of its ranks allow,
  // after a report of `worker`.
  void Advance(JobEntry& job, const std::string& worker, Turn& turn);
  // The worker has ranks of the attempt, and its daemon does not hold it, by a Hello or by a report
  // of one that has applied this revision of Desired.
  void ApplyAbsent(WorkerEntry& worker, JobEntry& job, uint64_t applied, bool hello, Turn& turn);
  // Nothing is known of the worker any more, which has ranks of the attempt.
  void GiveUp(WorkerEntry& worker, JobEntry& job, const std::string& reason, Turn& turn);
  // Whether a request of a rank on the worker is of the current attempt of the job and its
  // membership. kAborted: the epoch has ended. kPermissionDenied: no rank of it is on the worker.
  // kUnavailable: the membership is not the current one.
  absl::Status CheckCurrent(const WorkerEntry& worker, const std::string& job_id, uint64_t epoch,
                            uint32_t membership) const;

  // ---- time
  void CheckDeadlines(JobEntry& job, Turn& turn);
  // Stops a job that has run for its time_limit.
  void CheckTimeLimit(JobEntry& job, Turn& turn);

  // ---- the end
  // Frees the slots of ranks that are accounted for. Returns the jobs whose attempts have no others
  // and are to be released. Nothing else frees them and nothing else leads to a release, so that an
  // attempt never ends while something looks at it.
  std::set<JobId> FreeReleased(Turn& turn);
  struct Released {
    v1::AttemptEnd end;
    v1::JobState after;  // StateRow.after_release, which says what becomes of a job that ran
  };
  // Ends the attempt. The state of the job is as before: it is to go on by what is returned.
  // Requires: FreeReleased() has just named it.
  Released Release(JobEntry& job, Turn& turn);

  // Adds what does not hold. Requires: the job has an attempt.
  void Check(const JobEntry& job, std::vector<std::string>& broken) const {
    membership_.Check(job, broken);
  }

 private:
  void Transition(JobEntry& job, AttemptEvent event, const std::string& why, Turn& turn);
  void ApplyProgress(JobEntry& job, int rank, const v1::RankProgress& progress, Turn& turn);
  void CheckExits(JobEntry& job, Turn& turn);
  // As of Membership::Replace.
  bool Replace(JobEntry& job, const std::string& worker, const StopReason& reason,
               Departure departure, Turn& turn);
  // Tells every worker of the attempt what is desired now.
  static void TellWorkers(const JobEntry& job, Turn& turn);
  // Every rank of the attempt may be accounted for.
  static void FreeAllSlots(const JobEntry& job, Turn& turn);
  static v1::AttemptEnd EndOf(const JobEntry& job, const Turn& turn);
  bool AnyWorkerAway(const JobEntry& job) const;

  const CoreConfig& config_;
  const Identity& identity_;
  JobTable& jobs_;
  WorkerTable& workers_;
  Scheduling& scheduling_;
  const Reservations& reservations_;
  KeyValue& values_;
  Deadlines& deadlines_;
  JobStates& states_;
  Membership membership_{workers_, reservations_, values_};
  RunClock clock_{scheduling_, deadlines_};
  WorkerFaults faults_{workers_, scheduling_, deadlines_};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_ATTEMPTS_H_
