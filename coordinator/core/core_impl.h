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
#include "coordinator/core/device_accounts.h"
#include "coordinator/core/identity.h"
#include "coordinator/core/job_machine.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/key_value.h"
#include "coordinator/core/maintenance.h"
#include "coordinator/core/plan_record.h"
#include "coordinator/core/planned_job.h"
#include "coordinator/core/queues.h"
#include "coordinator/core/reachability.h"
#include "coordinator/core/reputation.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/slot_keeper.h"
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
  absl::StatusOr<Explained> Explain(const ExplainQuery& about, absl::Time now) override;
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
  void On(const ApplyQueuesEvent& event, Turn& turn);
  void On(const CreateTokenEvent& event, Turn& turn);
  void On(const RevokeTokenEvent& event, Turn& turn);
  void On(const AuditEvent& event, Turn& turn) { audit_.Append(event.entry, turn); }
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
  void CheckJob(const JobEntry& job, std::vector<std::string>& broken) const;

  // ---- core_jobs.cc
  // Takes the spec out of the event.
  void On(SubmitEvent& event, Turn& turn);
  void On(const CancelEvent& event, Turn& turn);
  static absl::Status CheckRequestId(const std::string& request_id);
  absl::Status Submit(SubmitEvent& event, ReplyAction& reply, Turn& turn);
  // A job that can be accepted.
  struct Submission {
    v1::JobSpec spec;  // its deadline is a time
    std::vector<v1::Dependency> after;
  };
  absl::StatusOr<Submission> CheckSubmission(v1::JobSpec spec, absl::Time now) const;
  JobEntry& Accept(Submission submission, const std::string& request_id, const Caller& caller,
                   Turn& turn);
  void CancelJob(JobEntry& job, Turn& turn);
  void On(const TimerFired& event, Turn& turn) {}
  JobId NewJobId(const std::string& name);
  WaitingJob AsWaiting(const JobEntry& job) const {
    return coordinator::AsWaiting(job, reservations_);
  }
  RunningJob AsRunning(const JobEntry& job) const {
    return coordinator::AsRunning(job, reservations_);
  }
  std::shared_ptr<const Elasticity> ElasticityOf(const JobEntry& job) const {
    return coordinator::ElasticityOf(job, reservations_);
  }
  // Explained without `deadline`.
  absl::StatusOr<Explained> ExplainWait(const ExplainQuery& about, absl::Time now);
  void Schedule(Turn& turn);
  void CarryOut(const Start& start, Turn& turn);

  // ---- core_arrays.cc
  void On(const SubmitArrayEvent& event, Turn& turn);
  void On(const ChangeArrayEvent& event, Turn& turn);
  absl::Status Submit(const SubmitArrayEvent& event, ReplyAction& reply, Turn& turn);
  absl::Status ChangeArray(const ChangeArrayEvent& event, v1::ArrayReport& report, Turn& turn);
  // kAlreadyExists: a live job or an array with live tasks has the name.
  absl::Status CheckArrayName(const std::string& name) const;
  // Why its tasks wait.
  v1::ArrayOutlook OutlookOf(const Array& array, absl::Time now);
  void CheckArrays(std::vector<std::string>& broken) const;

  // ---- core_preemption.cc
  void On(const ChangeJobEvent& event, Turn& turn);
  absl::Status Change(JobEntry& job, const ChangeJobEvent& event, Turn& turn);
  void CarryOut(const Preempt& preempt, Turn& turn);
  void CarryOut(const GiveUpKept& give_up, Turn& turn);
  void CarryOut(const Resize& resize, Turn& turn);
  absl::Status SetSize(JobEntry& job, const ChangeJobEvent& event, Turn& turn);
  // Asks the ranks to stop at the end of a step, with a checkpoint. Requires: the job is up.
  void Yield(JobEntry& job, const std::string& why, Turn& turn);
  // Ends the attempts whose ranks are accounted for, and lets their jobs go on. No other method
  // does, so that an attempt never ends while one looks at it.
  void EndReleasedAttempts(Turn& turn);
  void AfterRelease(JobEntry& job, const Attempts::Released& released, Turn& turn);
  void AfterFailure(JobEntry& job, const v1::AttemptEnd& end, Turn& turn);
  // The attempt of a job that yielded is released.
  void AfterYield(JobEntry& job, Turn& turn);
  // Requires: it has no attempt and held_by is set.
  void Hold(JobEntry& job, Turn& turn);
  absl::Status Suspend(JobEntry& job, const ChangeJobEvent& event, const std::string& why,
                       Turn& turn);
  void Unhold(JobEntry& job, const std::string& why, Turn& turn);
  absl::Status Requeue(JobEntry& job, const std::string& why, Turn& turn);

  // ---- core_deadline.cc
  // Ends a job whose deadline has passed, or sets its timer.
  void CheckJobDeadline(JobEntry& job, Turn& turn);
  // Of a live job with a deadline; `waiting` says why it waits, null: it runs, or would start now.
  static std::optional<v1::DeadlineOutlook> OutlookOf(const JobEntry& job,
                                                      const v1::WaitReason* waiting,
                                                      absl::Time now);

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
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CORE_IMPL_H_
