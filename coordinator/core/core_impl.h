// The core: what its parts own, put together, and the events that reach them. Private to
// coordinator/core.
//
// Each part owns a state, keeps an invariant of it and knows nothing of the core: it says back what
// follows from a change, and the core carries that out. Jobs and workers are in tables (jobs.h,
// workers.h) that the parts read.
//   queues.h, scheduling.h        what plans are made with
//   job_states.h                  the states of jobs, and what those without an attempt wait for
//   dependencies.h                of job_states.h: who waits for whose end
//   slot_keeper.h                 slots that are kept for jobs
//   arrays.h                      which jobs are tasks of which array, and whose turn it is
//   attempts.h                    one attempt of a job, from its allocation to its release; with
//   membership.h, run_clock.h, worker_faults.h
//   commits.h                     what ranks say of checkpoints and evaluations
//   checkpoints.h, gang.h         of one job: what it has committed, how far its ranks are
//   reachability.h                of a silent worker: whether it is lost; with domain_silence.h
//   desired_list.h                of a session: what its daemon was told
//   maintenance.h, reservations.h what operators ask of workers
//   reputation.h                  which workers are to be avoided
//   key_value.h                   bootstrap keys
//   device_accounts.h             what devices are used for
//   tokens.h, audit_log.h         who may call, who called
//
// The core itself is the life of jobs and attempts, which has no state but the tables:
//   core_impl.cc        recovery, dispatch, the end of every turn, reads
//   core_jobs.cc        submit, cancel, schedule, explain, job transitions
//   core_arrays.cc      arrays of jobs
//   core_deadline.cc    jobs that must have ended by a time
//   core_preemption.cc  jobs that stop for others or for a user, kept slots, holds
//   core_workers.cc     sessions, Observed, Desired, lost workers
//   core_fleet.cc       requests of operators about workers
#ifndef MUSTER_COORDINATOR_CORE_CORE_IMPL_H_
#define MUSTER_COORDINATOR_CORE_CORE_IMPL_H_

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "coordinator/core/attempts.h"
#include "coordinator/core/audit_log.h"
#include "coordinator/core/commits.h"
#include "coordinator/core/core.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/decisions.h"
#include "coordinator/core/device_accounts.h"
#include "coordinator/core/explainer.h"
#include "coordinator/core/identity.h"
#include "coordinator/core/job_life.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/key_value.h"
#include "coordinator/core/maintenance.h"
#include "coordinator/core/queues.h"
#include "coordinator/core/reachability.h"
#include "coordinator/core/reputation.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/slot_keeper.h"
#include "coordinator/core/submissions.h"
#include "coordinator/core/tokens.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

class CoreImpl : public Core {
 public:
  CoreImpl(const CoreConfig& config, Rng rng) : config_(config), rng_(rng) {
    workers_.SetTopology(config_.topology);
  }

  absl::Status Load(Store& store, absl::Time now);
  CoreOutput BeginTerm(absl::Time now);

  CoreOutput Handle(CoreEvent event, absl::Time now) override;
  uint64_t leader_term() const override { return identity_.leader_term; }
  const std::string& cluster_id() const override { return identity_.cluster_id; }
  const std::string& history_id() const override { return identity_.history_id; }
  absl::StatusOr<v1::Job> GetJob(const std::string& name_or_id) const override;
  std::vector<v1::Job> ListJobs(uint64_t before, int limit, uint64_t* next) const override;
  std::vector<v1::Worker> ListWorkers() const override;
  uint64_t last_event_sequence() const override { return log_.last_sequence(); }
  absl::StatusOr<WorkerId> LogHolder(const JobId& job, Epoch epoch, int rank) const override;
  std::optional<SessionId> SessionOf(const WorkerId& worker) const override;
  absl::StatusOr<Explained> Explain(const ExplainQuery& about, absl::Time now) override {
    return explainer_.Explain(about, now);
  }
  OpenUsage Usage(absl::Time now) override {
    accounts_.Advance(now);
    return accounts_.Usage(jobs_);
  }
  v1::GetQueuesResponse GetQueues(absl::Time now) override { return scheduling_.Queues(now); }
  const v1::QueuePolicy& queue_policy() const override { return queues_.policy(); }
  bool WouldDecide(absl::Time now) override { return scheduling_.WouldDecide(now); }
  std::vector<std::string> CheckInvariants(bool index) const override;

 private:
  // ---- core_impl.cc
  std::string ActorOf(const CoreEvent& event) const;
  // Takes the spec out of the event.
  void On(SubmitEvent& event, Turn& turn);
  void On(const SubmitArrayEvent& event, Turn& turn);
  void On(const CancelEvent& event, Turn& turn);
  void On(const ChangeJobEvent& event, Turn& turn);
  void On(const ChangeArrayEvent& event, Turn& turn);
  void On(const ApplyQueuesEvent& event, Turn& turn);
  void On(const CreateTokenEvent& event, Turn& turn);
  void On(const RevokeTokenEvent& event, Turn& turn);
  void On(const AuditEvent& event, Turn& turn) { audit_.Append(event.entry, turn); }
  void On(const TimerFired& event, Turn& turn) {}
  absl::Status RecoverJobs(Store& store, absl::Time now);
  absl::Status LoadKeyValue(Store& store);
  // The end of every turn: due deadlines, scheduling, messages to daemons, rows to persist, the
  // timer.
  void CompleteTurn(Turn& turn);
  // What is due, and jobs that have been released or waited for others.
  void CatchUp(Turn& turn);
  // Whether CatchUp() will change jobs that no plan of this turn has changed.
  bool HasMoreToChange(Turn& turn) const;
  // When the coordinator has not run for a while, moves the times at which workers and ranks were
  // last heard by as much.
  void ForgivePause(Turn& turn);
  void ArmTimer(Turn& turn);
  void PersistJobs(Turn& turn);
  void Publish(JobEntry& job, Turn& turn);

  // ---- core_invariants.cc
  void CheckJob(const JobEntry& job, std::vector<std::string>& broken) const;

  // ---- core_workers.cc
  void On(const SessionOpened& event, Turn& turn);
  void On(const SessionMessage& event, Turn& turn);
  void On(const SessionClosed& event, Turn& turn);
  absl::Status CheckHello(const SessionOpened& event) const;
  void Join(WorkerEntry& worker, const SessionOpened& event, bool known, Turn& turn);
  void Heard(WorkerEntry& worker, Turn& turn);
  void CheckWorker(WorkerEntry& worker, Turn& turn);
  void Keep(WorkerEntry& worker, const std::string& why, Turn& turn);
  void Lose(WorkerEntry& worker, const std::string& why, Turn& turn);
  void Close(WorkerEntry& worker, const std::string& why, Turn& turn);
  void On(const RemoveWorkerEvent& event, Turn& turn);
  void Apply(WorkerEntry& worker, const v1::Observed& observed, bool hello, Turn& turn);
  void RaiseEpochFloor(const WorkerEntry& worker, const JobId& id, uint64_t epoch, Turn& turn);
  // Sends what the worker should hold when that has changed, or seems lost.
  void SendDesired(WorkerEntry& worker, Turn& turn);
  absl::Duration StopGraceOf(const JobEntry& job) const;
  DesiredList::Attempt WantedOf(const WorkerEntry& worker, const JobEntry& job) const;
  // All that it should hold, with as many of the specs that it needs as one Desired may have.
  // Attempts without which it can do nothing yet are left out.
  std::map<JobId, DesiredList::Attempt> WantedOf(WorkerEntry& worker) const;
  static bool NeedsSpec(const WorkerEntry& worker, const JobEntry& job,
                        const DesiredList::Attempt& wanted);
  // Of the job's spec and checkpoints in a Desired of the worker.
  static size_t SpecBytes(const WorkerEntry& worker, const JobEntry& job);
  v1::DesiredAttempt DesiredOf(const WorkerEntry& worker, const JobEntry& job,
                               const DesiredList::Attempt& wanted) const;

  // ---- core_fleet.cc
  void On(const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::CordonRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::UncordonRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::ForgiveRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::DrainRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::ReserveRequest& request, const FleetEvent& event, Turn& turn);
  absl::Status Carry(const v1::UnreserveRequest& request, const FleetEvent& event, Turn& turn);
  // Takes the worker's ranks from the attempts that Maintenance::Check() names: replaces them
  // before the attempt trains, where that is possible, and else stops it.
  void CheckDrain(WorkerEntry& worker, Turn& turn);
  v1::Worker ViewOf(const WorkerEntry& worker) const;

  const CoreConfig config_;
  Rng rng_;
  Identity identity_;
  std::string stored_conditions_;  // the row kPlanConditions
  EventLog log_;
  StateLog state_log_;
  JobTable jobs_;
  WorkerTable workers_;
  Scheduling scheduling_{workers_.slots()};
  Maintenance maintenance_;
  Reservations reservations_;
  std::set<JobId> unpublished_;  // large gangs whose progress is published a little later
  DeviceAccounts accounts_;
  Queues queues_;
  KeyValue values_;
  Tokens tokens_;
  AuditLog audit_;
  Deadlines deadlines_;
  absl::Time armed_ = absl::InfiniteFuture();  // time of the newest TimerAction
  absl::Time last_turn_;
  Reachability reachability_{config_};
  JobStates states_{jobs_, scheduling_, reservations_, deadlines_};
  SlotKeeper kept_{workers_, scheduling_};
  Commits commits_{jobs_, scheduling_};
  Attempts attempts_{config_,
                     identity_,
                     {jobs_, workers_, scheduling_, reservations_, values_, deadlines_},
                     states_};
  JobLife life_{jobs_, scheduling_, reservations_, deadlines_, states_, kept_, attempts_};
  Decisions decisions_{jobs_, workers_, scheduling_, deadlines_, states_, kept_, attempts_, life_};
  Submissions submissions_{rng_, jobs_, scheduling_, states_, life_};
  Explainer explainer_{jobs_, workers_, scheduling_, reservations_};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CORE_IMPL_H_
