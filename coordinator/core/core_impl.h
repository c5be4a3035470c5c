// The core: what its parts own, put together, and the events that reach them. Private to
// coordinator/core.
//
// Each part owns a state, keeps an invariant of it and knows nothing of the core: it says back what
// follows from a change, and the core carries that out. Jobs and workers are in tables (jobs.h,
// workers.h) that the parts read. A part may use those above it, and none below:
//   queues.h, scheduling.h        what plans are made with
//   key_value.h                   bootstrap keys
//   tokens.h, audit_log.h         who may call, who called
//   device_accounts.h             what devices are used for
//   reservations.h                devices that operators keep for some jobs
//   job_states.h                  the states of jobs, and what those without an attempt wait for
//     dependencies.h, arrays.h    who waits for whose end, and for the turn in its array
//   slot_keeper.h                 slots that are kept for jobs
//   commits.h                     what ranks say of checkpoints and evaluations
//   attempts.h                    one attempt of a job, from its allocation to its release
//     checkpoints.h, gang.h       of one job: what it has committed, how far its ranks are
//     membership.h                which ranks an attempt has, and where
//     run_clock.h                 how long jobs have run, and when they are expected to end
//     worker_faults.h             what attempts say of workers; reputation.h keeps it
//   job_life.h                    what becomes of jobs: by users, ends of attempts, deadlines
//   decisions.h                   what plans decide, carried out
//   submissions.h, explainer.h    new jobs; answers to why one waits
//   worker_life.h                 sessions of workers, and what their silence leads to
//     reachability.h              whether a silent one is lost; with domain_silence.h
//   reports.h                     what daemons report that they hold
//   desired_state.h               what they should hold; desired_list.h: what they were told
//   fleet.h                       what operators ask of workers; with maintenance.h
//   job_publisher.h               jobs become durable, and watchers see them
//
// The core itself has no state but what it was started with and its timer:
//   core_impl.cc                  recovery, dispatch, the end of every turn, reads
//   core_invariants.cc            what holds of all parts together
#ifndef MUSTER_COORDINATOR_CORE_CORE_IMPL_H_
#define MUSTER_COORDINATOR_CORE_CORE_IMPL_H_

#include <optional>
#include <string>
#include <vector>

#include "coordinator/core/attempts.h"
#include "coordinator/core/audit_log.h"
#include "coordinator/core/commits.h"
#include "coordinator/core/core.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/decisions.h"
#include "coordinator/core/desired_state.h"
#include "coordinator/core/device_accounts.h"
#include "coordinator/core/explainer.h"
#include "coordinator/core/fleet.h"
#include "coordinator/core/identity.h"
#include "coordinator/core/job_life.h"
#include "coordinator/core/job_publisher.h"
#include "coordinator/core/job_states.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/key_value.h"
#include "coordinator/core/queues.h"
#include "coordinator/core/reports.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/slot_keeper.h"
#include "coordinator/core/submissions.h"
#include "coordinator/core/tokens.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/worker_life.h"
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
  std::string ActorOf(const CoreEvent& event) const;
  // Takes the spec out of the event.
  void On(SubmitEvent& event, Turn& turn);
  void On(const SubmitArrayEvent& event, Turn& turn);
  void On(const CancelEvent& event, Turn& turn);
  void On(const ChangeJobEvent& event, Turn& turn);
  void On(const ChangeArrayEvent& event, Turn& turn);
  void On(const SessionOpened& event, Turn& turn);
  void On(const SessionMessage& event, Turn& turn);
  void On(const SessionClosed& event, Turn& turn) { worker_life_.Closed(event, turn); }
  void On(const RemoveWorkerEvent& event, Turn& turn);
  void On(const FleetEvent& event, Turn& turn) { turn.Act(fleet_.Carry(event, turn)); }
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
  void CheckJob(const JobEntry& job, std::vector<std::string>& broken) const;

  const CoreConfig config_;
  Rng rng_;
  Identity identity_;
  std::string stored_conditions_;              // the row kPlanConditions
  absl::Time armed_ = absl::InfiniteFuture();  // time of the newest TimerAction
  absl::Time last_turn_;
  EventLog log_;
  StateLog state_log_;

  // Each uses those above it, which are therefore destroyed after it.
  JobTable jobs_;
  WorkerTable workers_;
  Deadlines deadlines_;
  Scheduling scheduling_{workers_.slots()};
  Queues queues_;
  KeyValue values_;
  Tokens tokens_;
  AuditLog audit_;
  DeviceAccounts accounts_;
  Reservations reservations_;
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
  WorkerLife worker_life_{config_,     identity_, jobs_,      workers_,
                          scheduling_, values_,   deadlines_, attempts_};
  Reports reports_{config_, jobs_, workers_, attempts_};
  DesiredState desired_{config_, jobs_};
  Fleet fleet_{{jobs_, workers_, scheduling_, reservations_, deadlines_},
               states_,
               attempts_,
               life_,
               worker_life_};
  JobPublisher publisher_{jobs_, deadlines_, accounts_};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CORE_IMPL_H_
