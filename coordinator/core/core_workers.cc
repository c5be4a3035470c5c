#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/network.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

namespace {

DeadlineKey WorkerDeadline(const WorkerEntry& worker) {
  return {DeadlineKey::Kind::kWorker, worker.row.name()};
}

// Of the histories of two copies of a cluster's state, or of what began in them. A version that
// had none says nothing.
bool Differ(const std::string& history, const std::string& other) {
  return !history.empty() && !other.empty() && history != other;
}

bool HoldsProcesses(const v1::ObservedAttempt& attempt) {
  return std::any_of(attempt.ranks().begin(), attempt.ranks().end(),
                     [](const v1::ObservedRank& rank) { return !IsGone(rank.state()); });
}

// Names a label that looks like one of a level for which the worker has none; empty: there is none.
// Other labels may mean anything.
std::string MisspeltLevel(const v1::Worker& row, const TopologyRules& topology) {
  if (topology.workers.contains(row.name())) return "";
  std::vector<std::string> missing;
  for (const std::string& level : topology.labels) {
    if (!row.labels().contains(level)) missing.push_back(level);
  }
  const std::map<std::string, std::string> labels(row.labels().begin(), row.labels().end());
  for (const auto& [label, value] : labels) {
    const auto& known = topology.labels;
    if (std::find(known.begin(), known.end(), label) != known.end()) continue;
    const std::string nearest = spec::NearestName(label, missing);
    if (nearest.empty()) continue;
    return absl::StrCat("; its label ", spec::Quoted(label), " is no level of the topology: if '",
                        nearest, "' is meant, start its daemon with --label ", nearest, "=", value);
  }
  return "";
}

}  // namespace

// ---- sessions -----------------------------------------------------------------------------------

absl::Status CoreImpl::CheckHello(const SessionOpened& event) const {
  const v1::Hello& hello = event.hello;
  if (hello.worker().empty() || hello.worker().size() > kWorkerNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat("worker name of ", hello.worker().size(),
                                                   " bytes; allowed are 1-", kWorkerNameBytesMax));
  }
  const std::string who = absl::StrCat("worker ", hello.worker(), ": ");
  if (!hello.cluster_id().empty() && hello.cluster_id() != identity_.cluster_id) {
    return absl::FailedPreconditionError(absl::StrCat(
        who, "its state directory belongs to cluster ", hello.cluster_id(), ", this is cluster ",
        identity_.cluster_id, "; use the other coordinator's address or another state directory"));
  }
  if (hello.devices_size() > kDevicesPerWorkerMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, hello.devices_size(), " devices; at most ", kDevicesPerWorkerMax));
  }
  std::set<std::string> names;
  for (const v1::Device& device : hello.devices()) {
    if (device.name().empty() || !names.insert(device.name()).second) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, "device name '", device.name(), "' is empty or not unique"));
    }
    if (!v1::DeviceKind_IsValid(device.kind())) {
      return absl::InvalidArgumentError(absl::StrCat(
          who, "device ", spec::Quoted(device.name()), " is of a kind, ",
          static_cast<int>(device.kind()),
          ", that this coordinator does not know; upgrade the coordinator before its workers"));
    }
  }
  for (const std::string& address : {hello.address(), hello.outside_address()}) {
    if (!address.empty() && (!IsIpAddress(address) || IsWildcardAddress(address))) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, "'", address.substr(0, kWorkerNameBytesMax),
                       "' is no numeric IP address at which it could be reached"));
    }
  }
  for (const std::string& id :
       {hello.boot_id(), hello.host_id(), hello.host(), hello.history_id()}) {
    if (id.size() > kWorkerNameBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat(who, "an id or host name of ", id.size(),
                                                     " bytes; at most ", kWorkerNameBytesMax));
    }
  }
  if (hello.identity().size() > kWorkerNameBytesMax) {
    return absl::InvalidArgumentError(absl::StrCat(who, "an identity of ", hello.identity().size(),
                                                   " bytes; at most ", kWorkerNameBytesMax));
  }
  if (hello.labels_size() > kWorkerLabelsMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(who, hello.labels_size(), " labels; at most ", kWorkerLabelsMax));
  }
  for (const auto& [label, value] : hello.labels()) {
    if (label.empty() || label.size() > kWorkerNameBytesMax || value.size() > kWorkerNameBytesMax) {
      return absl::InvalidArgumentError(
          absl::StrCat(who, "label ", spec::Quoted(label), " with a value of ", value.size(),
                       " bytes; names take 1-", kWorkerNameBytesMax, ", values at most as many"));
    }
  }
  const bool other_history = Differ(hello.history_id(), identity_.history_id);
  if (hello.leader_term() > identity_.leader_term ||
      (other_history && hello.leader_term() == identity_.leader_term)) {
    return absl::FailedPreconditionError(absl::StrCat(
        who, "it has obeyed leader term ", hello.leader_term(), " of cluster ",
        identity_.cluster_id,
        other_history ? absl::StrCat(", of history ", Bounded(hello.history_id())) : "",
        ", this coordinator has ", identity_.leader_term,
        other_history ? absl::StrCat(" of history ", identity_.history_id) : "",
        ": it runs on an older copy of the state. Stop it if the newer one is alive; a backup is "
        "brought back with `muster admin restore`",
        other_history ? ", on a machine whose clock is not behind" : ""));
  }
  const WorkerEntry* known = workers_.Find(WorkerId(hello.worker()));
  if (known == nullptr) return absl::OkStatus();
  if (!known->row.identity().empty() && hello.identity() != known->row.identity()) {
    // The ranks of a lost worker are given up, so that its name may pass to another daemon.
    if (known->row.state() == v1::WORKER_STATE_LOST) return absl::OkStatus();
    return absl::AlreadyExistsError(absl::StrCat(
        who, "the name belongs to another daemon, on host ", known->row.host(),
        "; start this one with another --name. If its state directory was deleted, it is let in "
        "once the worker is lost, or at once after `muster admin remove-worker ",
        hello.worker(), "`"));
  }
  if (event.incarnation.value() < known->row.incarnation()) {
    return absl::AbortedError(absl::StrCat(who, "incarnation ", event.incarnation.value(),
                                           " was replaced by ", known->row.incarnation(),
                                           "; is the name used by two daemons?"));
  }
  return absl::OkStatus();
}

void CoreImpl::On(const SessionOpened& event, Turn& turn) {
  if (const absl::Status status = CheckHello(event); !status.ok()) {
    turn.Act(CloseAction{event.session, status});
    return;
  }
  const WorkerId id(event.hello.worker());
  const bool known = workers_.Find(id) != nullptr;
  const absl::StatusOr<WorkerEntry*> added = workers_.Add(id, turn.batch());
  if (!added.ok()) {
    turn.Act(CloseAction{event.session, added.status()});
    return;
  }
  WorkerEntry& worker = **added;
  if (worker.session.has_value()) {
    values_.DropSession(*worker.session);
    turn.Act(CloseAction{
        *worker.session,
        absl::AbortedError(absl::StrCat("worker ", id.value(), " has opened a newer stream"))});
  }
  workers_.OpenSession(worker, event.session);
  Join(worker, event, known, turn);
  SendAction send;
  send.session = event.session;
  send.message.mutable_welcome()->set_heartbeat_interval_ms(
      absl::ToInt64Milliseconds(config_.heartbeat_interval));
  turn.Act(std::move(send));
  Apply(worker, event.hello.observed(), /*hello=*/true, turn);
  turn.DesiredChanged(id);
  turn.Reschedule();
}

void CoreImpl::Join(WorkerEntry& worker, const SessionOpened& event, bool known, Turn& turn) {
  const v1::Worker before = worker.row;
  const v1::Hello& hello = event.hello;
  v1::Worker& row = worker.row;
  workers_.SetState(worker, v1::WORKER_STATE_READY);
  worker.kept = false;
  worker.takes_spec_once = hello.protocol_version() >= 1;
  worker.runs_commands = hello.protocol_version() >= 2;
  worker.knows_memberships = hello.protocol_version() >= 3;
  worker.shares_devices = hello.protocol_version() >= 4;
  worker.keeps_specs = hello.protocol_version() >= 5;
  row.set_identity(hello.identity());
  row.set_host(hello.host());
  row.set_pid(hello.pid());
  row.set_version(hello.version());
  row.set_metrics_address(hello.metrics_address());
  row.set_address(hello.address());
  row.set_outside_address(hello.outside_address());
  row.set_boot_id(hello.boot_id());
  row.set_host_id(hello.host_id());
  row.set_incarnation(event.incarnation.value());
  *row.mutable_devices() = hello.devices();
  *row.mutable_labels() = hello.labels();
  workers_.Refresh(worker);
  row.set_slots(hello.devices_size());
  worker.last_heard = turn.now();
  reachability_.Note(worker, workers_, turn.now());
  deadlines_.Set(WorkerDeadline(worker), turn.now() + config_.unreachable_after);
  if (!known) {
    turn.Log(AboutWorker(
        row.name(), v1::EVENT_KIND_WORKER_JOINED,
        absl::StrCat("worker ", row.name(), " on host ", row.host(), " joined with ", row.slots(),
                     " slot(s)", MisspeltLevel(row, workers_.topology()))));
  } else if (before.state() != v1::WORKER_STATE_READY ||
             before.incarnation() != row.incarnation()) {
    turn.Log(AboutWorker(
        row.name(), v1::EVENT_KIND_WORKER_RETURNED,
        absl::StrCat("worker ", row.name(), " is back",
                     before.incarnation() != row.incarnation() ? ", its daemon was restarted" : "",
                     before.state() == v1::WORKER_STATE_LOST ? ", after it was given up" : "",
                     MisspeltLevel(row, workers_.topology()))));
  }
  if (!known || schema::Serialize(before) != schema::Serialize(row)) {
    WorkerTable::Persist(worker, turn);
  }
}

void CoreImpl::On(const SessionMessage& event, Turn& turn) {
  WorkerEntry* worker = workers_.FindSession(event.session);
  if (worker == nullptr) {
    turn.Act(CloseAction{event.session,
                         absl::AbortedError("this stream was replaced or closed; reconnect")});
    return;
  }
  if (event.message.incarnation() != worker->row.incarnation()) {
    turn.Act(CloseAction{
        event.session,
        absl::AbortedError(absl::StrCat("worker ", worker->row.name(),
                                        ": a message of incarnation ", event.message.incarnation(),
                                        " on a stream of ", worker->row.incarnation()))});
    values_.DropSession(event.session);
    workers_.CloseSession(*worker);
    return;
  }
  Heard(*worker, turn);
  const v1::FromWorker& message = event.message;
  switch (message.kind_case()) {
    case v1::FromWorker::kObserved:
      Apply(*worker, message.observed(), /*hello=*/false, turn);
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
        if (const auto move = maintenance_.AfterCheckpoint(*job); move.has_value()) {
          attempts_.Stop(*job, {v1::CAUSE_MAINTENANCE, move->why}, turn);
        }
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

void CoreImpl::On(const SessionClosed& event, Turn& turn) {
  WorkerEntry* worker = workers_.FindSession(event.session);
  if (worker == nullptr) return;
  values_.DropSession(event.session);
  workers_.CloseSession(*worker);
  turn.Reschedule();  // explanations name workers that are not connected
}

void CoreImpl::Heard(WorkerEntry& worker, Turn& turn) {
  worker.last_heard = turn.now();
  if (worker.row.state() == v1::WORKER_STATE_READY) return;
  workers_.SetState(worker, v1::WORKER_STATE_READY);
  reachability_.Note(worker, workers_, turn.now());
  worker.kept = false;
  turn.Log(AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_RETURNED,
                       absl::StrCat("worker ", worker.row.name(), " is heard again")));
  WorkerTable::Persist(worker, turn);
  deadlines_.Set(WorkerDeadline(worker), turn.now() + config_.unreachable_after);
  turn.Reschedule();
}

// ---- silence ------------------------------------------------------------------------------------

void CoreImpl::CheckWorker(WorkerEntry& worker, Turn& turn) {
  if (worker.row.state() == v1::WORKER_STATE_LOST) return;
  const absl::Duration silent = turn.now() - worker.last_heard;
  const Reachability::Verdict verdict = reachability_.Judge(worker, workers_, jobs_, turn.now());
  switch (verdict.kind) {
    case Reachability::Verdict::Kind::kLost:
      // Of one that was doing nothing, or is worked on, its silence says little.
      if (!worker.held.empty() && !worker.row.has_cordon()) {
        const JobEntry& job = *jobs_.Find(worker.held.begin()->second.front().job);
        reputation::Note(
            worker,
            {.cause = v1::CAUSE_WORKER_LOST, .job_name = job.name(), .job_id = job.fixed.id()},
            scheduling_.tree(), workers_, deadlines_, turn);
      }
      Lose(worker,
           absl::StrCat("worker ", worker.row.name(), " was not heard for ",
                        absl::FormatDuration(silent), " and is given up"),
           turn);
      return;
    case Reachability::Verdict::Kind::kKept:
      deadlines_.Set(WorkerDeadline(worker), verdict.look_again);
      Keep(worker, verdict.why, turn);
      return;
    case Reachability::Verdict::Kind::kUnreachable:
      if (worker.row.state() == v1::WORKER_STATE_READY) {
        workers_.SetState(worker, v1::WORKER_STATE_UNREACHABLE);
        reachability_.Note(worker, workers_, turn.now());
        turn.Log(
            AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_UNREACHABLE,
                        absl::StrCat("worker ", worker.row.name(), " was not heard for ",
                                     absl::FormatDuration(silent), "; its ranks may train on")));
        WorkerTable::Persist(worker, turn);
        turn.Act(Measured{Measured::What::kDetectFailure, absl::ToDoubleSeconds(silent)});
        turn.Reschedule();
      }
      break;
    case Reachability::Verdict::Kind::kReachable:
      break;
  }
  deadlines_.Set(WorkerDeadline(worker), verdict.look_again);
}

// Attempts that have ended train nothing any more: for them the worker counts as lost.
void CoreImpl::Keep(WorkerEntry& worker, const std::string& why, Turn& turn) {
  if (!worker.kept) {
    worker.kept = true;
    turn.Log(
        AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_UNREACHABLE,
                    absl::StrCat("worker ", worker.row.name(), " was not heard for ",
                                 absl::FormatDuration(turn.now() - worker.last_heard),
                                 " and is not given up: ", why, ". `muster admin remove-worker ",
                                 worker.row.name(), "` gives it up now")));
  }
  bool gave_up = false;
  for (const JobId& id : worker.Jobs()) {
    JobEntry& job = *jobs_.Find(id);
    if (job.up() && !job.Leaves(worker.row.name())) continue;
    attempts_.GiveUp(worker, job, absl::StrCat("worker ", worker.row.name(), " is silent"), turn);
    gave_up = true;
  }
  if (gave_up) Close(worker, "attempts with ranks on this worker were given up; reconnect", turn);
}

// Messages that still arrive on the stream were sent before. Only a new Hello tells what the daemon
// holds now.
void CoreImpl::Close(WorkerEntry& worker, const std::string& why, Turn& turn) {
  if (!worker.session.has_value()) return;
  turn.Act(CloseAction{*worker.session, absl::UnavailableError(why)});
  values_.DropSession(*worker.session);
  workers_.CloseSession(worker);
}

void CoreImpl::Lose(WorkerEntry& worker, const std::string& why, Turn& turn) {
  workers_.SetState(worker, v1::WORKER_STATE_LOST);
  reachability_.Note(worker, workers_, turn.now());
  worker.stale_attempts.clear();
  turn.Log(AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_LOST, why));
  WorkerTable::Persist(worker, turn);
  for (const JobId& id : worker.Jobs()) attempts_.GiveUp(worker, *jobs_.Find(id), why, turn);
  Close(worker, why, turn);
  turn.Reschedule();
}

void CoreImpl::On(const RemoveWorkerEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  if (WorkerEntry* worker = workers_.Find(WorkerId(event.worker)); worker == nullptr) {
    reply.status =
        absl::NotFoundError(absl::StrCat("no worker has the name ", spec::Quoted(event.worker),
                                         "; `muster get workers` lists them"));
  } else {
    const std::string why = absl::StrCat("worker ", event.worker, " was removed by an operator");
    if (worker->row.state() != v1::WORKER_STATE_LOST) Lose(*worker, why, turn);
    life_.EndReleasedAttempts(turn);  // nothing may be held by a worker that is forgotten
    turn.Log(AboutWorker(event.worker, v1::EVENT_KIND_WORKER_REMOVED, why));
    deadlines_.Clear(WorkerDeadline(*worker));
    deadlines_.Clear({DeadlineKey::Kind::kReputation, event.worker});
    workers_.Remove(WorkerId(event.worker), turn.batch());
    reservations_.Refresh(workers_, deadlines_);
    states_.ReservationsChanged(turn);
  }
  turn.Act(std::move(reply));
}

// ---- observed -----------------------------------------------------------------------------------

void CoreImpl::Apply(WorkerEntry& worker, const v1::Observed& observed, bool hello, Turn& turn) {
  const std::string& name = worker.row.name();
  std::set<JobId> absent = worker.Jobs();
  std::set<std::string> stale;
  worker.foreign_attempts.clear();
  worker.observed.clear();
  for (const v1::ObservedAttempt& attempt : observed.attempts()) {
    const JobId id(attempt.job_id());
    RaiseEpochFloor(worker, id, attempt.epoch(), turn);
    JobEntry* job = worker.Jobs().count(id) > 0 ? jobs_.Find(id) : nullptr;
    const bool current = job != nullptr && job->epoch().value() == attempt.epoch();
    const bool foreign = current && Differ(attempt.history_id(), job->attempt.history_id());
    if (foreign) worker.foreign_attempts.emplace(id, job->epoch());
    if (!current || foreign) {
      if (HoldsProcesses(attempt)) {
        stale.insert(absl::StrCat("job ", attempt.job_id(), " epoch ", attempt.epoch()));
      }
      continue;
    }
    absent.erase(id);
    worker.observed.emplace(std::make_pair(id, job->epoch()), attempt.has_spec());
    if (!attempts_.IsOfMembership(*job, name, attempt, turn)) continue;
    for (const v1::ObservedRank& rank : attempt.ranks())
      attempts_.ApplyRank(*job, name, rank, turn);
    if (!attempt.refusal().empty() && job->up()) {
      const v1::Cause cause = attempt.refusal_cause() == v1::CAUSE_UNSPECIFIED
                                  ? v1::CAUSE_LAUNCH
                                  : attempt.refusal_cause();
      attempts_.ReplaceOrStop(
          *job, name,
          {cause, absl::StrCat("worker ", name, ": ", Bounded(attempt.refusal())), -1, -1, false,
           false, name},
          Departure::kToBeProven, turn);
      continue;
    }
    attempts_.Advance(*job, name, turn);
  }
  for (const JobId& id : absent) {
    attempts_.ApplyAbsent(worker, *jobs_.Find(id), observed.applied_revision(), hello, turn);
  }
  if (stale != worker.stale_attempts) {
    worker.stale_attempts = std::move(stale);
    workers_.Refresh(worker);
    turn.Reschedule();
  }
  if (worker.specs_wait) turn.DesiredChanged(worker.id());  // there may be room for them now
  // The Desired may have been lost although its stream is up: it is sent again.
  if (!hello && worker.desired.Applied(observed.applied_revision(), 2 * config_.heartbeat_interval,
                                       turn.now())) {
    turn.DesiredChanged(worker.id());
  }
}

// Only after the state was restored from a backup can a daemon hold an epoch that is not known
// here. It must not be used again. Until the job has begun its first epoch after a restore, any
// worker may have had it; else a worker that has never had a rank of the job says what cannot be.
void CoreImpl::RaiseEpochFloor(const WorkerEntry& worker, const JobId& id, uint64_t epoch,
                               Turn& turn) {
  JobEntry* job = jobs_.Find(id);
  if (job == nullptr || epoch <= job->epoch().value() || epoch < job->state.epoch_floor() ||
      epoch > job->epoch().value() + kEpochsAheadMax) {
    return;
  }
  const std::string& name = worker.row.name();
  const auto& past = job->past_attempts;
  const bool had_rank = HasRank(job->attempt, name) || job->Leaves(name) ||
                        std::any_of(past.begin(), past.end(), [&name](const auto& attempt) {
                          return HasRank(attempt, name);
                        });
  if (!had_rank && job->state.epoch_floor() <= job->epoch().value()) return;
  job->state.set_epoch_floor(epoch + 1);
  turn.Persist(id);
}

// ---- desired ------------------------------------------------------------------------------------

absl::Duration CoreImpl::StopGraceOf(const JobEntry& job) const {
  switch (job.state.stop_cause()) {
    case v1::CAUSE_PREEMPTED:
    case v1::CAUSE_RESIZED:
    case v1::CAUSE_DEADLINE:
    case v1::CAUSE_MAINTENANCE:
      // Its ranks were not asked to stop when one of them was ended by somebody else. A job of
      // before there was such a field has none.
      if (job.state.stop_rank() >= 0 || !job.spec().preemption().has_grace()) {
        return config_.stop_grace;
      }
      return FromProto(job.spec().preemption().grace());
    case v1::CAUSE_UNSPECIFIED:
    case v1::CAUSE_CANCELLED:
    case v1::CAUSE_TIME_LIMIT:
      return config_.stop_grace;
    default:
      return std::min(config_.stop_grace, kFailedStopGrace);
  }
}

DesiredList::Attempt CoreImpl::WantedOf(const WorkerEntry& worker, const JobEntry& job) const {
  if (!job.Leaves(worker.row.name())) {
    return {job.epoch(), PropertiesOf(job.state.attempt_state()).asked, StopGraceOf(job),
            job.membership()};
  }
  DesiredList::Attempt wanted{job.epoch(), v1::DESIRED_PHASE_STOPPED,
                              std::min(config_.stop_grace, kFailedStopGrace), 1};
  for (const v1::Placement& placement : job.attempt.leaving()) {
    if (placement.worker() == worker.row.name()) wanted.membership = placement.membership();
  }
  return wanted;
}

// A daemon that is to end an attempt asks nothing of its spec, and neither does one whose ranks
// run: each has got its assignment. Where ranks were replaced, a rank that runs may not have been
// told yet, until it trains; and a daemon that does not keep specs tells it again after a restart.
bool CoreImpl::NeedsSpec(const WorkerEntry& worker, const JobEntry& job,
                         const DesiredList::Attempt& wanted) {
  if (wanted.phase == v1::DESIRED_PHASE_STOPPED) return false;
  const bool first = job.membership() == 1;
  if (worker.keeps_specs) {
    const auto observed = worker.observed.find({job.id(), job.epoch()});
    if (observed != worker.observed.end() && observed->second) return false;
  } else if (!first) {
    return true;
  }
  const v1::RankState told = first ? v1::RANK_STATE_RUNNING : v1::RANK_STATE_TRAINING;
  const std::vector<int32_t>& ranks = job.gang.On(worker.row.name());
  return std::any_of(ranks.begin(), ranks.end(),
                     [&job, told](int32_t rank) { return job.gang.state(rank) < told; });
}

std::map<JobId, DesiredList::Attempt> CoreImpl::WantedOf(WorkerEntry& worker) const {
  std::map<JobId, DesiredList::Attempt> wanted;
  // Specs that were sent stay in every Desired until they have arrived, so they come first.
  std::vector<JobId> sent, others;
  for (const JobId& id : worker.Jobs()) {
    const JobEntry& job = *jobs_.Find(id);
    DesiredList::Attempt attempt = WantedOf(worker, job);
    if (NeedsSpec(worker, job, attempt)) {
      const DesiredList::Attempt* listed = worker.desired.Find(id, job.epoch());
      // A daemon that does not keep specs has every one that it was sent, and would lose it.
      const bool held = !worker.keeps_specs && worker.observed.contains({id, job.epoch()});
      (held || (listed != nullptr && listed->described) ? sent : others).push_back(id);
    }
    wanted.emplace(id, attempt);
  }
  worker.specs_wait = false;
  size_t bytes = 0;
  for (const JobId& id : sent) {
    bytes += SpecBytes(worker, *jobs_.Find(id));
    wanted[id].described = true;
  }
  for (const JobId& id : others) {
    const JobEntry& job = *jobs_.Find(id);
    const size_t more = SpecBytes(worker, job);
    if (bytes == 0 || bytes + more <= kDesiredSpecBytesMax) {
      bytes += more;
      wanted[id].described = true;
      continue;
    }
    worker.specs_wait = true;
    // One that it does not hold is not listed yet. One that it holds would be stale if it were not.
    if (!worker.observed.contains({id, job.epoch()}) &&
        worker.desired.Find(id, job.epoch()) == nullptr) {
      wanted.erase(id);
    }
  }
  return wanted;
}

size_t CoreImpl::SpecBytes(const WorkerEntry& worker, const JobEntry& job) {
  size_t bytes = job.spec().ByteSizeLong();
  for (const v1::CheckpointRecord& checkpoint : job.attempt.restore()) {
    bytes += checkpoint.ByteSizeLong();
  }
  return worker.takes_spec_once ? bytes : bytes * job.gang.On(worker.row.name()).size();
}

v1::DesiredAttempt CoreImpl::DesiredOf(const WorkerEntry& worker, const JobEntry& job,
                                       const DesiredList::Attempt& wanted) const {
  v1::DesiredAttempt out;
  out.set_job_id(job.fixed.id());
  out.set_job_name(job.name());
  out.set_owner(job.fixed.owner());
  out.set_epoch(job.epoch().value());
  out.set_history_id(job.attempt.history_id());
  out.set_membership(wanted.membership);
  out.set_stop_grace_ms(absl::ToInt64Milliseconds(wanted.stop_grace));
  out.set_phase(wanted.phase);
  if (job.Leaves(worker.row.name())) {
    for (const v1::Placement& placement : job.attempt.leaving()) {
      if (placement.worker() != worker.row.name()) continue;
      v1::RankAssignment& rank = *out.add_ranks();
      rank.set_job_id(job.fixed.id());
      rank.set_epoch(job.epoch().value());
      rank.set_rank(placement.rank());
      rank.set_device(placement.device());
      rank.set_membership(wanted.membership);
    }
    return out;
  }
  // Ranks know one size, that of their attempt.
  v1::JobSpec sized;
  if (job.elastic() && wanted.described) sized = spec::AtSize(job.spec(), job.gang.size());
  const v1::JobSpec& spec = job.elastic() ? sized : job.spec();
  if (worker.takes_spec_once && wanted.described) {
    *out.mutable_spec() = spec;
    *out.mutable_restore() = job.attempt.restore();
  }
  const std::vector<int32_t>& ranks = job.gang.On(worker.row.name());
  const bool gpus = job.spec().resources().device() == v1::DEVICE_KIND_CUDA;
  int32_t group_rank = 0;
  if (job.runs_command() && !ranks.empty()) {
    for (const auto& [other, there] : job.gang.by_worker()) {
      group_rank += there.front() < ranks.front() ? 1 : 0;
    }
  }
  int32_t local_rank = 0;
  for (const int32_t number : ranks) {
    const v1::Placement& placement = job.attempt.placements(number);
    v1::RankAssignment& rank = *out.add_ranks();
    rank.set_job_id(job.fixed.id());
    rank.set_job_name(job.name());
    rank.set_epoch(job.epoch().value());
    rank.set_membership(wanted.membership);
    rank.set_rank(number);
    rank.set_world_size(job.gang.size());
    rank.set_local_rank(local_rank++);
    rank.set_local_ranks(static_cast<int32_t>(ranks.size()));
    rank.set_device(placement.device());
    rank.set_address(placement.address());
    rank.set_threads(job.spec().resources().threads_per_rank());
    if (job.runs_command()) {
      rank.set_group_rank(group_rank);
      rank.set_group_world_size(static_cast<int32_t>(job.gang.by_worker().size()));
      rank.set_attempt(job.state.attempts());
      for (size_t i = 0; gpus && i < ranks.size(); ++i) {
        rank.add_local_devices(job.attempt.placements(ranks[i]).device());
      }
    }
    if (worker.takes_spec_once || !wanted.described) continue;
    *rank.mutable_spec() = spec;
    *rank.mutable_restore() = job.attempt.restore();
  }
  return out;
}

void CoreImpl::SendDesired(WorkerEntry& worker, Turn& turn) {
  const std::map<JobId, DesiredList::Attempt> wanted = WantedOf(worker);
  if (!worker.desired.Update(wanted)) return;
  worker.desired.Sent(turn.now());
  SendAction send;
  send.session = *worker.session;
  v1::Desired& desired = *send.message.mutable_desired();
  desired.set_revision(worker.desired.revision());
  for (const auto& [id, attempt] : wanted) {
    *desired.add_attempts() = DesiredOf(worker, *jobs_.Find(id), attempt);
  }
  turn.Act(std::move(send));
}

}  // namespace muster::coordinator
