// What operators ask of workers.
#ifndef MUSTER_COORDINATOR_CORE_FLEET_H_
#define MUSTER_COORDINATOR_CORE_FLEET_H_

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/core/attempts.h"
#include "coordinator/core/core.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/job_life.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/maintenance.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/worker_life.h"
#include "coordinator/core/workers.h"
#include "muster/v1/fleet.pb.h"

namespace muster::coordinator {

// Carries out what Maintenance, Reservations and the reputation of workers say of attempts and of
// jobs that wait. Thread: the core's. What it is made of outlives it.
class Fleet {
 public:
  struct Tables {
    JobTable& jobs;
    WorkerTable& workers;
    Scheduling& scheduling;
    Reservations& reservations;
    Deadlines& deadlines;
  };
  Fleet(const Tables& tables, JobStates& states, Attempts& attempts, JobLife& life,
        WorkerLife& worker_life)
      : jobs_(tables.jobs),
        workers_(tables.workers),
        scheduling_(tables.scheduling),
        reservations_(tables.reservations),
        deadlines_(tables.deadlines),
        states_(states),
        attempts_(attempts),
        life_(life),
        worker_life_(worker_life) {}

  // After a restart: sets the deadlines.
  void Recover(absl::Time now);

  // The reply has the workers as they are then. kInvalidArgument, kNotFound, kFailedPrecondition:
  // the request, which then changes nothing.
  ReplyAction Carry(const FleetEvent& event, Turn& turn);
  // The worker does not come back. kNotFound.
  absl::Status Remove(const RemoveWorkerEvent& event, Turn& turn);

  // Takes the worker's ranks from the attempts that Maintenance::Check() names: replaces them
  // before the attempt trains, where that is possible, and else stops it.
  void CheckDrain(WorkerEntry& worker, Turn& turn);
  // Notes which of the workers that are being drained hold no slot any more.
  void NoteDrained(Turn& turn) { maintenance_.NoteDrained(workers_, deadlines_, turn); }
  // The job has committed a checkpoint: it moves, if a worker of it is being drained.
  void AfterCheckpoint(JobEntry& job, Turn& turn);
  void ReviewReputation(WorkerEntry& worker, Turn& turn);
  void ExpireReservations(Turn& turn);

  // The worker as users see it.
  v1::Worker ViewOf(const WorkerEntry& worker) const;

 private:
  absl::Status Carry(const v1::CordonRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::UncordonRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::ForgiveRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::DrainRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::ReserveRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::UnreserveRequest& request, const FleetEvent& event, Turn& turn);

  JobTable& jobs_;
  WorkerTable& workers_;
  Scheduling& scheduling_;
  Reservations& reservations_;
  Deadlines& deadlines_;
  JobStates& states_;
  Attempts& attempts_;
  JobLife& life_;
  WorkerLife& worker_life_;
  Maintenance maintenance_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_FLEET_H_
