#include "coordinator/core/worker_life.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/network.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/reputation.h"
#include "coordinator/core/schema.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

namespace {

DeadlineKey WorkerDeadline(const WorkerEntry& worker) {
  return {DeadlineKey::Kind::kWorker, worker.row.name()};
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

absl::Status WorkerLife::CheckHello(const SessionOpened& event) const {
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

WorkerEntry* WorkerLife::Open(const SessionOpened& event, Turn& turn) {
  if (const absl::Status status = CheckHello(event); !status.ok()) {
    turn.Act(CloseAction{event.session, status});
    return nullptr;
  }
  const WorkerId id(event.hello.worker());
  const bool known = workers_.Find(id) != nullptr;
  const absl::StatusOr<WorkerEntry*> added = workers_.Add(id, turn.batch());
  if (!added.ok()) {
    turn.Act(CloseAction{event.session, added.status()});
    return nullptr;
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
  return &worker;
}

void WorkerLife::Join(WorkerEntry& worker, const SessionOpened& event, bool known, Turn& turn) {
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

WorkerEntry* WorkerLife::Receive(const SessionMessage& event, Turn& turn) {
  WorkerEntry* worker = workers_.FindSession(event.session);
  if (worker == nullptr) {
    turn.Act(CloseAction{event.session,
                         absl::AbortedError("this stream was replaced or closed; reconnect")});
    return nullptr;
  }
  if (event.message.incarnation() != worker->row.incarnation()) {
    turn.Act(CloseAction{
        event.session,
        absl::AbortedError(absl::StrCat("worker ", worker->row.name(),
                                        ": a message of incarnation ", event.message.incarnation(),
                                        " on a stream of ", worker->row.incarnation()))});
    values_.DropSession(event.session);
    workers_.CloseSession(*worker);
    return nullptr;
  }
  Heard(*worker, turn);
  return worker;
}

void WorkerLife::Closed(const SessionClosed& event, Turn& turn) {
  WorkerEntry* worker = workers_.FindSession(event.session);
  if (worker == nullptr) return;
  values_.DropSession(event.session);
  workers_.CloseSession(*worker);
  turn.Reschedule();  // explanations name workers that are not connected
}

void WorkerLife::Heard(WorkerEntry& worker, Turn& turn) {
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

void WorkerLife::Check(WorkerEntry& worker, Turn& turn) {
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
void WorkerLife::Keep(WorkerEntry& worker, const std::string& why, Turn& turn) {
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
void WorkerLife::Close(WorkerEntry& worker, const std::string& why, Turn& turn) {
  if (!worker.session.has_value()) return;
  turn.Act(CloseAction{*worker.session, absl::UnavailableError(why)});
  values_.DropSession(*worker.session);
  workers_.CloseSession(worker);
}

void WorkerLife::Lose(WorkerEntry& worker, const std::string& why, Turn& turn) {
  workers_.SetState(worker, v1::WORKER_STATE_LOST);
  reachability_.Note(worker, workers_, turn.now());
  worker.stale_attempts.clear();
  turn.Log(AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_LOST, why));
  WorkerTable::Persist(worker, turn);
  for (const JobId& id : worker.Jobs()) attempts_.GiveUp(worker, *jobs_.Find(id), why, turn);
  Close(worker, why, turn);
  turn.Reschedule();
}

void WorkerLife::Forget(WorkerEntry& worker, const std::string& why, Turn& turn) {
  const WorkerId id = worker.id();
  turn.Log(AboutWorker(id.value(), v1::EVENT_KIND_WORKER_REMOVED, why));
  deadlines_.Clear(WorkerDeadline(worker));
  deadlines_.Clear({DeadlineKey::Kind::kReputation, id.value()});
  workers_.Remove(id, turn.batch());
}

void WorkerLife::Recover(absl::Time now) {
  for (const auto& [id, worker] : workers_.entries()) {
    if (worker.row.state() == v1::WORKER_STATE_LOST) continue;
    reachability_.Note(worker, workers_, now);
    deadlines_.Set(WorkerDeadline(worker), now);
  }
}

void WorkerLife::ForgivePause(absl::Duration away, absl::Time now) {
  // Streams may have broken in a long pause: as after a restart, daemons get the full time to come
  // back.
  const bool long_pause = away >= config_.unreachable_after;
  for (auto& [id, worker] : workers_.entries()) {
    if (worker.row.state() == v1::WORKER_STATE_LOST) continue;
    worker.last_heard = long_pause ? now : std::min(now, worker.last_heard + away);
  }
}

}  // namespace muster::coordinator
