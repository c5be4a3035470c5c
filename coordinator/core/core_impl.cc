#include "coordinator/core/core_impl.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/migrate.h"
#include "coordinator/core/plan_record.h"
#include "coordinator/core/restore.h"
#include "coordinator/core/schema.h"
#include "proto/time.h"
#include "security/authorize.h"

namespace muster::coordinator {

absl::StatusOr<std::unique_ptr<Core>> Core::Recover(const CoreConfig& config, Store& store, Rng rng,
                                                    absl::Time now, CoreOutput* output) {
  auto core = std::make_unique<CoreImpl>(config, rng);
  RETURN_IF_ERROR(Migrate(store));
  RETURN_IF_ERROR(core->Load(store, now));
  *output = core->BeginTerm(now);
  return core;
}

absl::Status CoreImpl::Load(Store& store, absl::Time now) {
  ASSIGN_OR_RETURN(const std::optional<std::string> cluster,
                   store.Get(Table::kMeta, kMetaClusterId));
  if (!cluster.has_value())
    return absl::DataLossError("the store has no cluster id; restore it from a backup");
  identity_.cluster_id = *cluster;
  ASSIGN_OR_RETURN(const std::optional<std::string> history,
                   store.Get(Table::kMeta, schema::kHistoryId));
  identity_.history_id = history.value_or("");
  ASSIGN_OR_RETURN(const std::optional<std::string> term,
                   store.Get(Table::kMeta, schema::kLeaderTerm));
  if (term.has_value()) {
    ASSIGN_OR_RETURN(identity_.leader_term, schema::DecodeU64(*term));
  }
  ASSIGN_OR_RETURN(const std::optional<std::string> last,
                   store.Get(Table::kMeta, schema::kLastEvent));
  if (last.has_value()) {
    ASSIGN_OR_RETURN(const uint64_t sequence, schema::DecodeU64(*last));
    log_.Recover(sequence);
  }
  ASSIGN_OR_RETURN(const std::optional<std::string> entry,
                   store.Get(Table::kMeta, schema::kLastLogEntry));
  if (entry.has_value()) {
    ASSIGN_OR_RETURN(const uint64_t index, schema::DecodeU64(*entry));
    state_log_.Recover(index);
  }
  ASSIGN_OR_RETURN(const std::optional<std::string> conditions,
                   store.Get(Table::kMeta, schema::kPlanConditions));
  stored_conditions_ = conditions.value_or("");
  absl::Status row_status;
  RETURN_IF_ERROR(
      store.Scan(Table::kWorkers, "", "", [&](const std::string& key, const std::string& value) {
        v1::Worker row;
        row_status = schema::Parse(Table::kWorkers, key, value, row);
        if (row_status.ok()) workers_.Recover(std::move(row), now);
        return row_status.ok();
      }));
  RETURN_IF_ERROR(row_status);
  RETURN_IF_ERROR(queues_.Load(store, scheduling_));
  RETURN_IF_ERROR(RecoverJobs(store, now));
  RETURN_IF_ERROR(accounts_.Load(store, now));
  RETURN_IF_ERROR(audit_.Load(store));
  RETURN_IF_ERROR(tokens_.Load(store));
  return LoadKeyValue(store);
}

absl::Status CoreImpl::RecoverJobs(Store& store, absl::Time now) {
  using Jobs = std::map<uint64_t, JobEntry>;
  ASSIGN_OR_RETURN(Jobs jobs, LoadJobs(store, now));
  for (auto& [sequence, loaded] : jobs) {
    JobEntry& job = jobs_.Add(std::move(loaded));
    kept_.Recover(job);
    if (job.has_attempt()) {
      RETURN_IF_ERROR(attempts_.Recover(job));
    }
  }
  return absl::OkStatus();
}

absl::Status CoreImpl::LoadKeyValue(Store& store) {
  absl::Status row_status;
  RETURN_IF_ERROR(
      store.Scan(Table::kKeyValue, "", "", [&](const std::string& key, const std::string& value) {
        const auto decoded = schema::DecodeKeyValueKey(key);
        row_status = decoded.status();
        if (row_status.ok()) values_.Recover(*decoded, value);
        return row_status.ok();
      }));
  return row_status;
}

CoreOutput CoreImpl::BeginTerm(absl::Time now) {
  Turn turn(now, "coordinator", log_, state_log_);
  accounts_.Advance(now);
  accounts_.Begin(jobs_, workers_, turn);
  state_log_.set_term(++identity_.leader_term);
  last_turn_ = now;
  turn.batch().Put(Table::kMeta, schema::kLeaderTerm, schema::EncodeU64(identity_.leader_term));
  if (identity_.history_id.empty()) {  // of a new store, or of a version that had none
    identity_.history_id = NewHistoryId(rng_);
    turn.batch().Put(Table::kMeta, schema::kHistoryId, identity_.history_id);
  }
  const v1::PlanConditions conditions = ConditionsOf(config_.topology);
  if (std::string row = schema::Serialize(conditions); row != stored_conditions_) {
    stored_conditions_ = row;
    turn.batch().Put(Table::kMeta, schema::kPlanConditions, std::move(row));
    *turn.log_entry().mutable_conditions() = conditions;
    for (const QueueTree::Queue& queue : scheduling_.tree().queues()) {
      AddUsage(scheduling_, queue.name, *turn.log_entry().mutable_queue_usage());
    }
  }
  v1::Event event;
  event.set_kind(v1::EVENT_KIND_COORDINATOR_STARTED);
  event.set_rank(-1);
  event.set_message(absl::StrCat("coordinator of cluster ", identity_.cluster_id,
                                 " started, leader term ", identity_.leader_term));
  turn.Log(std::move(event));
  worker_life_.Recover(now);
  fleet_.Recover(now);
  states_.ReservationsChanged(turn);
  for (const auto& [sequence, id] : jobs_.live()) {
    JobEntry& job = *jobs_.Find(id);
    // The clock may have been set back since the back-off was decided: no more than its whole
    // length is left. What plans are made from is stored, so that they can be made again.
    const v1::BackoffSpec& backoff = job.spec().restart().backoff();
    const absl::Time latest =
        now + (job.ends.empty() ? FromProto(backoff.max())
                                : BackoffBefore(backoff, job.ends.back().cause(),
                                                job.state.restarts_in_a_row()));
    if (job.state.has_not_before() && FromProto(job.state.not_before()) > latest) {
      *job.state.mutable_not_before() = ToProto(latest);
      turn.Persist(id);
    }
    if (!job.spec().deadline().empty()) {
      deadlines_.Set({DeadlineKey::Kind::kJobDeadline, id.value()}, now);
    }
    if (job.has_attempt()) {
      attempts_.Resume(job, turn);
    } else if (job.state.state() == v1::JOB_STATE_HELD) {
      if (!job.state.after().empty()) states_.AwaitDependencies(job, turn);
      job.waiting = JobStates::HeldReason(job);
    } else {
      states_.Wait(job, turn);
    }
  }
  for (const auto& [id, job] : jobs_.entries()) turn.Changed(id);
  tokens_.Announce(turn);
  turn.Reschedule();
  CompleteTurn(turn);
  return turn.Finish();
}

CoreOutput CoreImpl::Handle(CoreEvent event, absl::Time now) {
  Turn turn(now, ActorOf(event), log_, state_log_);
  accounts_.Advance(now);
  ForgivePause(turn);
  worker_life_.Observe(now);
  std::visit(
      [&](auto& e) {
        On(e, turn);
        if constexpr (requires { e.caller; }) audit_.Append(e.caller, e.call, turn);
      },
      event);
  CompleteTurn(turn);
  return turn.Finish();
}

void CoreImpl::On(SubmitEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  const absl::StatusOr<JobEntry*> job = submissions_.Submit(event, reply, turn);
  reply.status = job.status();
  while (turn.TakeReschedule()) {
    decisions_.Schedule(turn);  // before the reply, which says why the job waits
  }
  if (job.ok()) reply.job = (*job)->View();
  turn.Act(std::move(reply));
}

void CoreImpl::On(const SubmitArrayEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = submissions_.SubmitArray(event, reply, turn);
  while (turn.TakeReschedule()) decisions_.Schedule(turn);
  turn.Act(std::move(reply));
}

void CoreImpl::On(const CancelEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  const absl::StatusOr<const JobEntry*> found = jobs_.Resolve(event.job);
  if (!found.ok()) {
    reply.status = found.status();
    turn.Act(std::move(reply));
    return;
  }
  JobEntry& job = *jobs_.Find((*found)->id());
  reply.status =
      security::AuthorizeChange(event.caller.principal, job.fixed.owner(), job.spec().queue());
  if (!reply.status.ok()) {
    turn.Act(std::move(reply));
    return;
  }
  life_.Cancel(job, turn);
  reply.job = job.View();
  turn.Act(std::move(reply));
}

void CoreImpl::On(const ChangeJobEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  const absl::StatusOr<const JobEntry*> found = jobs_.Resolve(event.job);
  if (!found.ok()) {
    reply.status = found.status();
  } else {
    JobEntry& job = *jobs_.Find((*found)->id());
    reply.status =
        security::AuthorizeChange(event.caller.principal, job.fixed.owner(), job.spec().queue());
    if (reply.status.ok()) reply.status = life_.Change(job, event, turn);
    while (turn.TakeReschedule()) decisions_.Schedule(turn);  // the reply says where it stands
    reply.job = job.View();
  }
  turn.Act(std::move(reply));
}

void CoreImpl::On(const ChangeArrayEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = life_.ChangeArray(event, reply.array, turn);
  while (turn.TakeReschedule()) decisions_.Schedule(turn);
  turn.Act(std::move(reply));
}

void CoreImpl::On(const SessionOpened& event, Turn& turn) {
  WorkerEntry* worker = worker_life_.Open(event, turn);
  if (worker == nullptr) return;
  reports_.Apply(*worker, event.hello.observed(), /*hello=*/true, turn);
  turn.DesiredChanged(worker->id());
  turn.Reschedule();
}

void CoreImpl::On(const SessionMessage& event, Turn& turn) {
  WorkerEntry* worker = worker_life_.Receive(event, turn);
  if (worker == nullptr) return;
  const v1::FromWorker& message = event.message;
  switch (message.kind_case()) {
    case v1::FromWorker::kObserved:
      reports_.Apply(*worker, message.observed(), /*hello=*/false, turn);
      break;
    case v1::FromWorker::kPut:
      if (const absl::Status current = attempts_.CheckCurrent(
              *worker, message.put().job_id(), message.put().epoch(), message.put().membership());
          current.ok()) {
        values_.Put(event.session, message.put(), turn);
      } else {
        KeyValue::Reply(event.session, message.put().request(), current, "", turn);
      }
      break;
    case v1::FromWorker::kGet:
      if (const absl::Status current = attempts_.CheckCurrent(
              *worker, message.get().job_id(), message.get().epoch(), message.get().membership());
          current.ok()) {
        values_.Get(event.session, message.get(), turn);
      } else {
        KeyValue::Reply(event.session, message.get().request(), current, "", turn);
      }
      break;
    case v1::FromWorker::kCommit:
      if (JobEntry* job = commits_.Commit(*worker, message.commit(), turn); job != nullptr) {
        fleet_.AfterCheckpoint(*job, turn);
      }
      break;
    case v1::FromWorker::kNotice:
      commits_.Notice(*worker, message.notice(), turn);
      break;
    case v1::FromWorker::kHello:
    case v1::FromWorker::kLog:  // the shell has taken replies to its own requests
    case v1::FromWorker::kCollectives:
    case v1::FromWorker::kProfile:
    case v1::FromWorker::KIND_NOT_SET:
      break;
  }
}

void CoreImpl::On(const RemoveWorkerEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = fleet_.Remove(event, turn);
  turn.Act(std::move(reply));
}

void CoreImpl::On(const ApplyQueuesEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = queues_.Define(event.policy, scheduling_, turn);
  if (reply.status.ok()) {
    for (auto& [id, worker] : workers_.entries()) {
      fleet_.ReviewReputation(worker, turn);
    }
    reply.warnings = scheduling_.WarningsOf(event.policy);
  }
  turn.Act(std::move(reply));
}

void CoreImpl::On(const CreateTokenEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = tokens_.Create(event.row, event.caller.actor, turn);
  turn.Act(std::move(reply));
}

void CoreImpl::On(const RevokeTokenEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = tokens_.Revoke(event.id, turn);
  turn.Act(std::move(reply));
}

std::string CoreImpl::ActorOf(const CoreEvent& event) const {
  struct Visitor {
    const WorkerTable& workers;
    std::string operator()(const SubmitEvent& e) const { return e.caller.actor; }
    std::string operator()(const SubmitArrayEvent& e) const { return e.caller.actor; }
    std::string operator()(const ChangeArrayEvent& e) const { return e.caller.actor; }
    std::string operator()(const CancelEvent& e) const { return e.caller.actor; }
    std::string operator()(const ChangeJobEvent& e) const { return e.caller.actor; }
    std::string operator()(const FleetEvent& e) const { return e.caller.actor; }
    std::string operator()(const RemoveWorkerEvent& e) const { return e.caller.actor; }
    std::string operator()(const ApplyQueuesEvent& e) const { return e.caller.actor; }
    std::string operator()(const CreateTokenEvent& e) const { return e.caller.actor; }
    std::string operator()(const RevokeTokenEvent& e) const { return e.caller.actor; }
    std::string operator()(const AuditEvent&) const { return "coordinator"; }
    std::string operator()(const TimerFired&) const { return "coordinator"; }
    std::string operator()(const SessionOpened& e) const {
      return absl::StrCat("worker ", e.hello.worker().substr(0, kWorkerNameBytesMax));
    }
    std::string operator()(const SessionMessage& e) const { return OfSession(e.session); }
    std::string operator()(const SessionClosed& e) const { return OfSession(e.session); }
    std::string OfSession(SessionId session) const {
      const WorkerEntry* worker = workers.FindSession(session);
      return worker == nullptr ? "coordinator" : absl::StrCat("worker ", worker->row.name());
    }
  };
  return std::visit(Visitor{workers_}, event);
}

void CoreImpl::ForgivePause(Turn& turn) {
  const absl::Duration away = turn.now() - std::exchange(last_turn_, turn.now());
  // Without a timer nothing is watched, and no turn was due.
  if (armed_ == absl::InfiniteFuture() || away <= kTurnIntervalMax + kPauseMin) return;
  worker_life_.ForgivePause(away, turn.now());
  for (const auto& [sequence, id] : jobs_.live()) {
    JobEntry& job = *jobs_.Find(id);
    if (!job.has_attempt()) continue;
    for (absl::Time* time : {&job.attempt_since, &job.progress_at}) {
      *time = std::min(turn.now(), *time + away);
    }
    job.gang.ForgivePause(away, turn.now());
    if (job.symptom_at.has_value()) {
      job.symptom_at = std::min(turn.now(), *job.symptom_at + away);
    }
  }
  v1::Event event;
  event.set_kind(v1::EVENT_KIND_COORDINATOR_PAUSED);
  event.set_rank(-1);
  event.set_message(absl::StrCat(
      "the coordinator did not run for ", absl::FormatDuration(absl::Trunc(away, absl::Seconds(1))),
      ": it was stopped, or its machine or disk had stalled; silence in that time does not count"));
  turn.Log(std::move(event));
}

// A timer that is due before it is wanted stays: its turn finds nothing to do.
void CoreImpl::ArmTimer(Turn& turn) {
  absl::Time wanted = deadlines_.next();
  if (wanted != absl::InfiniteFuture()) wanted = std::min(wanted, turn.now() + kTurnIntervalMax);
  const bool spent = armed_ <= turn.now();
  if (!spent && wanted >= armed_) return;
  if (spent && wanted == armed_) return;
  armed_ = wanted;
  turn.Act(TimerAction{armed_});
}

void CoreImpl::CatchUp(Turn& turn) {
  for (const DeadlineKey& due : deadlines_.TakeDue(turn.now())) {
    switch (due.kind) {
      case DeadlineKey::Kind::kWorker:
        if (WorkerEntry* worker = workers_.Find(WorkerId(due.id)); worker != nullptr) {
          worker_life_.Check(*worker, turn);
        }
        break;
      case DeadlineKey::Kind::kAttempt:
        if (JobEntry* job = jobs_.Find(JobId(due.id)); job != nullptr)
          attempts_.CheckDeadlines(*job, turn);
        break;
      case DeadlineKey::Kind::kTimeLimit:
        if (JobEntry* job = jobs_.Find(JobId(due.id)); job != nullptr)
          attempts_.CheckTimeLimit(*job, turn);
        break;
      case DeadlineKey::Kind::kJobDeadline:
        if (JobEntry* job = jobs_.Find(JobId(due.id)); job != nullptr) {
          life_.CheckDeadline(*job, turn);
        }
        break;
      case DeadlineKey::Kind::kSchedule:
        turn.Reschedule();
        break;
      case DeadlineKey::Kind::kPublish:
        publisher_.PublishLate(turn);
        break;
      case DeadlineKey::Kind::kDrain:
        if (WorkerEntry* worker = workers_.Find(WorkerId(due.id)); worker != nullptr) {
          fleet_.CheckDrain(*worker, turn);
        }
        break;
      case DeadlineKey::Kind::kReputation:
        if (WorkerEntry* worker = workers_.Find(WorkerId(due.id)); worker != nullptr) {
          fleet_.ReviewReputation(*worker, turn);
        }
        break;
      case DeadlineKey::Kind::kReservations:
        fleet_.ExpireReservations(turn);
        break;
    }
  }
  life_.EndReleasedAttempts(turn);
  states_.ResolveDependents(turn);
  states_.AdmitTasks(turn);
}

bool CoreImpl::HasMoreToChange(Turn& turn) const {
  if (states_.pending() || deadlines_.next() <= turn.now()) {
    return true;
  }
  std::set<std::string> planned;
  for (const v1::PlanRecord& plan : turn.log_entry().plans()) {
    for (const v1::RowChange& row : plan.before()) planned.insert(row.key());
  }
  return std::any_of(
      turn.released().begin(), turn.released().end(),
      [&planned](const auto& released) { return !planned.contains(released.first.value()); });
}

void CoreImpl::CompleteTurn(Turn& turn) {
  // A submission plans before its reply. What the turn changes behind that cannot be told apart
  // later.
  if (turn.log_entry().plans_size() > 0 && HasMoreToChange(turn)) {
    for (v1::PlanRecord& plan : *turn.log_entry().mutable_plans()) {
      plan.set_incomplete("its turn went on to change what else was due");
    }
  }
  CatchUp(turn);
  fleet_.NoteDrained(turn);
  while (turn.TakeReschedule()) {
    decisions_.Schedule(turn);
    life_.EndReleasedAttempts(
        turn);  // a job that is stopped for another one may have ranks that are gone
    states_.ResolveDependents(turn);
    states_.AdmitTasks(turn);
  }
  for (const WorkerId& id : turn.desired_changed()) {
    WorkerEntry* worker = workers_.Find(id);
    if (worker != nullptr && worker->session.has_value()) desired_.Send(*worker, turn);
  }
  accounts_.BringUpToDate(jobs_, workers_, scheduling_.Spares(), turn);
  jobs_.ForgetOldest(turn);
  publisher_.Persist(turn);
  Queues::PutUsage(scheduling_, turn);
  ArmTimer(turn);
}

// ---- reads --------------------------------------------------------------------------------------

absl::StatusOr<v1::Job> CoreImpl::GetJob(const std::string& name_or_id) const {
  ASSIGN_OR_RETURN(const JobEntry* job, jobs_.Resolve(name_or_id));
  return job->View();
}

std::vector<v1::Job> CoreImpl::ListJobs(uint64_t before, int limit, uint64_t* next) const {
  std::vector<v1::Job> out;
  const auto& all = jobs_.by_sequence();
  auto it = before == 0 ? all.end() : all.lower_bound(before);
  *next = 0;
  while (it != all.begin() && static_cast<int>(out.size()) < limit) {
    --it;
    out.push_back(jobs_.Find(it->second)->View());
    *next = it == all.begin() ? 0 : it->first;
  }
  return out;
}

std::vector<v1::Worker> CoreImpl::ListWorkers() const {
  std::vector<v1::Worker> out;
  for (const auto& [id, worker] : workers_.entries()) out.push_back(fleet_.ViewOf(worker));
  return out;
}

absl::StatusOr<WorkerId> CoreImpl::LogHolder(const JobId& id, Epoch epoch, int rank) const {
  const JobEntry* job = jobs_.Find(id);
  if (job == nullptr) return absl::NotFoundError(absl::StrCat("no job has the id ", id.value()));
  if (epoch.value() == 0) epoch = job->epoch();
  if (epoch.value() == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", id.value(), " has not started any rank yet"));
  }
  std::vector<const v1::AttemptRow*> attempts = {&job->attempt};
  for (const v1::AttemptRow& past : job->past_attempts) attempts.push_back(&past);
  for (const v1::AttemptRow* attempt : attempts) {
    if (attempt->epoch() != epoch.value()) continue;
    if (rank < 0 || rank >= attempt->placements_size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "job ", id.value(), " has ranks 0 to ", attempt->placements_size() - 1, ", not ", rank));
    }
    return WorkerId(attempt->placements(rank).worker());
  }
  return absl::NotFoundError(absl::StrCat("job ", id.value(), ": nothing is known of epoch ",
                                          epoch.value(), "; its newest is ", job->epoch().value()));
}

std::optional<SessionId> CoreImpl::SessionOf(const WorkerId& id) const {
  const WorkerEntry* worker = workers_.Find(id);
  return worker == nullptr ? std::nullopt : worker->session;
}

}  // namespace muster::coordinator
