#include "worker/daemon/daemon_core.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "worker/daemon/limits.h"

namespace muster::worker {
namespace {

constexpr char kClusterRecord[] = "cluster";
constexpr char kAttemptPrefix[] = "attempt.";
constexpr char kCommitPrefix[] = "commit.";

std::string AttemptRecordName(const AttemptKey& key) {
  return absl::StrCat(kAttemptPrefix, DirectoryName(key));
}
std::string CommitRecordName(const AttemptKey& key, int64_t step) {
  return absl::StrCat(kCommitPrefix, DirectoryName(key), ".", step);
}

template <typename Message>
AttemptKey KeyOf(const Message& message) {
  return {JobId(message.job_id()), Epoch(message.epoch())};
}

bool Started(const v1::StoredRank& rank) {
  return rank.state() == v1::STORED_RANK_STATE_STARTING ||
         rank.state() == v1::STORED_RANK_STATE_RUNNING;
}
bool Exited(const v1::StoredRank& rank) {
  return rank.state() == v1::STORED_RANK_STATE_EXITED ||
         rank.state() == v1::STORED_RANK_STATE_RELEASED;
}

// Past its bootstrap, by its own account.
bool Trains(const v1::RankProgress& progress) {
  constexpr const char* kBefore[] = {"", "starting", "balancing", "bootstrapping", "allocating"};
  return progress.step() > 0 ||
         std::find(std::begin(kBefore), std::end(kBefore), progress.phase()) == std::end(kBefore);
}

v1::RankState ReportedState(const v1::StoredRank& rank, const v1::RankProgress& progress) {
  switch (rank.state()) {
    case v1::STORED_RANK_STATE_PREPARED:
    case v1::STORED_RANK_STATE_STARTING:
      return v1::RANK_STATE_PREPARED;
    case v1::STORED_RANK_STATE_RUNNING:
      return Trains(progress) ? v1::RANK_STATE_TRAINING : v1::RANK_STATE_RUNNING;
    case v1::STORED_RANK_STATE_EXITED:
      return v1::RANK_STATE_EXITED;
    case v1::STORED_RANK_STATE_RELEASED:
      return v1::RANK_STATE_RELEASED;
    default:
      return v1::RANK_STATE_ASSIGNED;
  }
}

}  // namespace

std::string ToString(const AttemptKey& key) {
  return absl::StrCat(key.job.value(), " epoch ", key.epoch.value());
}
std::string ToString(const RankKey& key) {
  return absl::StrCat(ToString(key.attempt), " rank ", key.rank);
}

std::string DirectoryName(const AttemptKey& key) {
  std::string name;
  for (const char c : key.job.value()) {
    if (absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_') {
      name.push_back(c);
    } else {
      absl::StrAppendFormat(&name, "%%%02X", static_cast<unsigned char>(c));
    }
  }
  return absl::StrCat(name, ".e", key.epoch.value());
}

std::string RunDirectoryName(const RankKey& key) {
  return absl::StrCat(DirectoryName(key.attempt), "/rank-", key.rank);
}

// ---- recovery -----------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<DaemonCore>> DaemonCore::Recover(
    DaemonCoreConfig config, const std::map<std::string, std::string>& records, absl::Time now,
    DaemonOutput* output) {
  std::unique_ptr<DaemonCore> core(new DaemonCore(std::move(config)));
  core->heartbeat_interval_ = core->config_.heartbeat_interval;
  RETURN_IF_ERROR(core->Load(records));
  core->now_ = now;
  core->output_ = output;
  for (auto& [key, attempt] : core->attempts_) {
    for (auto& [number, rank] : attempt.ranks) {
      const RankKey rank_key{key, number};
      if (Started(rank.stored)) {
        rank.attaching = true;
        core->Act(AttachRank{rank_key});
      } else if (rank.stored.state() == v1::STORED_RANK_STATE_EXITED) {
        core->Act(VerifyRelease{rank_key});
      }
    }
  }
  core->Finish();
  return core;
}

absl::Status DaemonCore::Load(const std::map<std::string, std::string>& records) {
  for (const auto& [name, value] : records) {
    const auto broken = [&name = name] {
      return absl::DataLossError(absl::StrCat("record ", name, " of the daemon cannot be read"));
    };
    if (name == kClusterRecord) {
      if (!cluster_.ParseFromString(value)) return broken();
    } else if (absl::StartsWith(name, kAttemptPrefix)) {
      Attempt attempt;
      if (!attempt.stored.ParseFromString(value)) return broken();
      for (const v1::StoredRank& stored : attempt.stored.ranks()) {
        Rank& rank = attempt.ranks[stored.rank()];
        rank.stored = stored;
        rank.progress = stored.progress();
      }
      attempt.stored.clear_ranks();
      const AttemptKey key = KeyOf(attempt.stored);
      attempts_.emplace(key, std::move(attempt));
    } else if (absl::StartsWith(name, kCommitPrefix)) {
      PendingCommit pending;
      if (!pending.commit.ParseFromString(value)) return broken();
      const CommitKey key(KeyOf(pending.commit), pending.commit.checkpoint().step());
      commits_.emplace(key, std::move(pending));
    } else {
      return broken();
    }
  }
  return absl::OkStatus();
}

DaemonOutput DaemonCore::Handle(const DaemonEvent& event, absl::Time now) {
  DaemonOutput output;
  now_ = now;
  output_ = &output;
  std::visit([this](const auto& e) { On(e); }, event);
  Converge();
  Finish();
  return output;
}

// ---- session ------------------------------------------------------------------------------------

void DaemonCore::On(const SessionUp& event) {
  session_ = event.session;
  welcomed_ = false;
  welcome_deadline_ = now_ + config_.welcome_timeout;
  applied_revision_.reset();
  for (auto& [key, pending] : commits_) pending.sent_at.reset();
  v1::FromWorker message;
  *message.mutable_hello() = config_.hello;
  if (!event.address.empty()) {
    config_.hello.set_address(event.address);
    config_.hello.set_outside_address(event.outside_address);
    *message.mutable_hello() = config_.hello;
  }
  message.mutable_hello()->set_metrics_address(Reachable(config_.hello.metrics_address()));
  message.mutable_hello()->set_cluster_id(cluster_.cluster_id());
  *message.mutable_hello()->mutable_observed() = Observe();
  Send(std::move(message));
}

void DaemonCore::On(const DeviceFailed& event) {
  for (v1::Device& device : *config_.hello.mutable_devices()) {
    if (device.name() != event.device || !device.unusable().empty()) continue;
    device.set_unusable(event.why);
    if (session_.has_value()) {
      Act(Reconnect{*session_, absl::StrCat("device ", event.device, " failed: ", event.why)});
    }
  }
}

void DaemonCore::On(const SessionDown& event) {
  if (session_ != event.session) return;
  session_.reset();
  welcomed_ = false;
}

bool DaemonCore::AcceptLeader(const CoordinatorMessage& event) {
  if (session_ != event.session) return false;  // late, of a stream that is gone
  const v1::FromCoordinator& message = event.message;
  if (!cluster_.cluster_id().empty() && message.cluster_id() != cluster_.cluster_id()) {
    Act(Reconnect{event.session,
                  absl::StrCat("the coordinator belongs to cluster ", message.cluster_id(),
                               ", this worker to ", cluster_.cluster_id())});
    return false;
  }
  if (message.leader_term() < cluster_.leader_term()) {
    Act(Reconnect{event.session,
                  absl::StrCat("the coordinator's leader term ", message.leader_term(),
                               " is older than ", cluster_.leader_term(), ", which was seen")});
    return false;
  }
  if (message.leader_term() > cluster_.leader_term() || cluster_.cluster_id().empty()) {
    cluster_.set_cluster_id(message.cluster_id());
    cluster_.set_leader_term(message.leader_term());
    output_->records.push_back({kClusterRecord, cluster_.SerializeAsString()});
  }
  return true;
}

void DaemonCore::On(const CoordinatorMessage& event) {
  if (!AcceptLeader(event)) return;
  const v1::FromCoordinator& message = event.message;
  switch (message.kind_case()) {
    case v1::FromCoordinator::kWelcome:
      return OnWelcome(message.welcome());
    case v1::FromCoordinator::kDesired:
      return OnDesired(message.desired());
    case v1::FromCoordinator::kValue:
      return OnKeyValueReply(message.value());
    case v1::FromCoordinator::kVerdict:
      return OnVerdict(message.verdict());
    case v1::FromCoordinator::kLog:
    case v1::FromCoordinator::KIND_NOT_SET:
      return;
  }
}

void DaemonCore::OnWelcome(const v1::Welcome& welcome) {
  if (welcomed_) return;
  welcomed_ = true;
  welcome_deadline_ = absl::InfiniteFuture();
  if (welcome.heartbeat_interval_ms() > 0) {
    heartbeat_interval_ = absl::Milliseconds(welcome.heartbeat_interval_ms());
  }
  // Commits go first: an exit in the Observed that follows would end the attempt, and with it the
  // chance of its last checkpoint.
  SendCommits();
  state_changed_ = true;
  for (const auto& [request, pending] : puts_) {
    v1::FromWorker message;
    *message.mutable_put() = pending.put;
    Send(std::move(message));
  }
  for (const auto& [key, pending] : gets_) SendGet(key, pending);
  for (PendingNotice& pending : notices_) {
    v1::FromWorker message;
    *message.mutable_notice() = std::move(pending.notice);
    Send(std::move(message));
    Reply(pending.call, v1::NotifyResponse());
  }
  notices_.clear();
}

void DaemonCore::OnKeyValueReply(const v1::KeyValueReply& reply) {
  const absl::Status status(static_cast<absl::StatusCode>(reply.status_code()),
                            reply.status_message());
  if (auto put = puts_.find(reply.request()); put != puts_.end()) {
    if (status.ok()) {
      Reply(put->second.call, v1::PutResponse());
    } else {
      Fail(put->second.call, status);
    }
    puts_.erase(put);
    return;
  }
  for (auto get = gets_.begin(); get != gets_.end(); ++get) {
    if (get->second.request != reply.request()) continue;
    for (const CallId call : get->second.calls) {
      if (status.ok()) {
        v1::GetResponse response;
        response.set_value(reply.value());
        Reply(call, std::move(response));
      } else {
        Fail(call, status);
      }
    }
    gets_.erase(get);
    return;
  }
}

void DaemonCore::OnVerdict(const v1::CheckpointVerdict& verdict) {
  const AttemptKey key = KeyOf(verdict);
  if (commits_.erase({key, verdict.step()}) == 0) return;
  state_changed_ = true;  // an exit may have waited for this
  output_->records.push_back({CommitRecordName(key, verdict.step()), std::nullopt});
  Attempt* attempt = FindAttempt(key);
  if (attempt == nullptr || verdict.status_code() != 0) return;
  if (verdict.step() > attempt->stored.last_committed_step()) {
    attempt->stored.set_last_committed_step(verdict.step());
    PersistAttempt(key);
  }
}

// ---- desired state ------------------------------------------------------------------------------

void DaemonCore::OnDesired(const v1::Desired& desired) {
  if (applied_revision_.has_value() && desired.revision() <= *applied_revision_) return;
  applied_revision_ = desired.revision();
  state_changed_ = true;  // acknowledges the revision
  std::set<AttemptKey> wanted;
  for (const v1::DesiredAttempt& attempt : desired.attempts()) {
    const AttemptKey key = KeyOf(attempt);
    wanted.insert(key);
    Adopt(key, attempt);
  }
  for (auto& [key, attempt] : attempts_) {
    if (wanted.count(key) > 0 || attempt.stored.stale()) continue;
    attempt.stored.set_stale(true);
    PersistAttempt(key);
    EndCalls(key, "is not wanted any more");
  }
}

void DaemonCore::Adopt(const AttemptKey& key, const v1::DesiredAttempt& desired) {
  const bool known = attempts_.count(key) > 0;
  Attempt& attempt = attempts_[key];
  if (attempt.stored.stale()) return;
  v1::StoredAttempt& stored = attempt.stored;
  if (!known) {
    stored.set_job_id(desired.job_id());
    stored.set_job_name(desired.job_name());
    stored.set_epoch(desired.epoch());
  }
  // Phases only advance within an epoch.
  if (!known || desired.phase() > stored.phase() ||
      desired.stop_grace_ms() != stored.stop_grace_ms()) {
    stored.set_phase(std::max(stored.phase(), desired.phase()));
    stored.set_stop_grace_ms(desired.stop_grace_ms());
    PersistAttempt(key);
  }
  for (const v1::RankAssignment& assignment : desired.ranks()) {
    Rank& rank = attempt.ranks[assignment.rank()];
    if (rank.stored.state() == v1::STORED_RANK_STATE_UNSPECIFIED) {
      rank.stored.set_rank(assignment.rank());
      rank.stored.set_device(assignment.device());
      rank.stored.set_state(v1::STORED_RANK_STATE_ASSIGNED);
      attempt.prepared_asked = false;
      PersistAttempt(key);
    }
    rank.assignment = assignment;
    CompleteAssignment(key, rank.assignment);
  }
  if (stored.refusal().empty()) {
    const std::string why = WhyRefuse(desired);
    if (!why.empty()) Refuse(key, attempt, v1::CAUSE_LAUNCH, why);
  }
  if (stored.phase() == v1::DESIRED_PHASE_STOPPED) EndCalls(key, "is being stopped");
}

std::string DaemonCore::WhyRefuse(const v1::DesiredAttempt& desired) const {
  std::set<std::string> taken;
  for (const v1::RankAssignment& rank : desired.ranks()) {
    const auto& devices = config_.hello.devices();
    const bool offered = std::any_of(devices.begin(), devices.end(), [&](const v1::Device& device) {
      return device.name() == rank.device();
    });
    if (!offered) {
      return absl::StrCat("worker ", config_.hello.worker(), " has no device ", rank.device(),
                          " for rank ", rank.rank());
    }
    if (!taken.insert(rank.device()).second) {
      return absl::StrCat("device ", rank.device(), " is given to more than one rank");
    }
  }
  return "";
}

void DaemonCore::Refuse(const AttemptKey& key, Attempt& attempt, v1::Cause cause,
                        const std::string& why) {
  attempt.stored.set_refusal(why);
  attempt.stored.set_refusal_cause(cause);
  PersistAttempt(key);
}

std::string DaemonCore::Reachable(const std::string& listening) const {
  const v1::Hello& hello = config_.hello;
  return Advertised(listening,
                    hello.outside_address().empty() ? hello.address() : hello.outside_address());
}

void DaemonCore::CompleteAssignment(const AttemptKey& key, v1::RankAssignment& assignment) const {
  assignment.set_job_id(key.job.value());
  assignment.set_epoch(key.epoch.value());
  assignment.set_daemon_socket(config_.rank_socket);
  assignment.set_run_directory(absl::StrCat(config_.attempts_directory, "/", DirectoryName(key),
                                            "/rank-", assignment.rank()));
  assignment.set_worker(config_.hello.worker());
  assignment.set_cache_directory(config_.cache_directory);
  assignment.set_metrics_address(config_.rank_metrics_address);
  assignment.set_rank_ports(config_.rank_ports);
  assignment.set_host_id(config_.hello.host_id());
  if (assignment.threads() <= 0) {
    assignment.set_threads(assignment.spec().resources().threads_per_rank());
  }
  if (assignment.threads() <= 0) assignment.set_threads(config_.threads_per_slot);
}

// ---- convergence --------------------------------------------------------------------------------

void DaemonCore::Converge() {
  for (auto& [key, attempt] : attempts_) ConvergeAttempt(key, attempt);
  for (auto it = attempts_.begin(); it != attempts_.end();) {
    const auto& ranks = it->second.ranks;
    const bool released = std::all_of(ranks.begin(), ranks.end(), [](const auto& entry) {
      return entry.second.stored.state() == v1::STORED_RANK_STATE_RELEASED;
    });
    if (!it->second.stored.stale() || !released) {
      ++it;
      continue;
    }
    PersistAttempt(it->first);
    Act(AttemptForgotten{it->first});
    it = attempts_.erase(it);
  }
}

void DaemonCore::ConvergeAttempt(const AttemptKey& key, Attempt& attempt) {
  if (attempt.stored.stale() || attempt.stored.phase() == v1::DESIRED_PHASE_STOPPED) {
    for (auto& [number, rank] : attempt.ranks) StopRank({key, number}, attempt, rank);
    return;
  }
  if (!attempt.stored.refusal().empty()) return;
  PrepareAttempt prepare{key, {}};
  for (auto& [number, rank] : attempt.ranks) {
    const bool described = !rank.assignment.job_id().empty();
    if (rank.stored.state() == v1::STORED_RANK_STATE_ASSIGNED && described) {
      prepare.ranks.push_back(rank.assignment);
    }
    if (attempt.stored.phase() == v1::DESIRED_PHASE_RUNNING && described &&
        rank.stored.state() == v1::STORED_RANK_STATE_PREPARED &&
        !DeviceBusy(rank.stored.device())) {
      rank.stored.set_state(v1::STORED_RANK_STATE_STARTING);
      PersistAttempt(key);
      Act(StartRank{{key, number}, rank.assignment});
    }
  }
  if (!prepare.ranks.empty() && !attempt.prepared_asked) {
    attempt.prepared_asked = true;
    Act(std::move(prepare));
  }
}

void DaemonCore::StopRank(const RankKey& key, const Attempt& attempt, Rank& rank) {
  switch (rank.stored.state()) {
    case v1::STORED_RANK_STATE_ASSIGNED:
    case v1::STORED_RANK_STATE_PREPARED:
      return EnterExited(key, rank);
    case v1::STORED_RANK_STATE_RUNNING:
      break;
    default:
      return;  // an answer is under way, or nothing is left to do
  }
  if (rank.attaching || rank.killed) return;
  if (attempt.stored.stale() || (rank.kill_at.has_value() && now_ >= *rank.kill_at)) {
    rank.killed = true;
    Act(SignalRank{key, /*kill=*/true});
  } else if (!rank.kill_at.has_value()) {
    const int64_t grace_ms = attempt.stored.stop_grace_ms();
    rank.kill_at = now_ + (grace_ms > 0 ? absl::Milliseconds(grace_ms) : config_.stop_grace);
    Act(SignalRank{key, /*kill=*/false});
  }
}

// Also for a rank that never ran: whatever may still be on the machine in its name is looked for.
void DaemonCore::EnterExited(const RankKey& key, Rank& rank) {
  rank.stored.set_state(v1::STORED_RANK_STATE_EXITED);
  rank.attaching = false;
  PersistAttempt(key.attempt);
  Act(VerifyRelease{key});
}

bool DaemonCore::DeviceBusy(const std::string& device) const {
  for (const auto& [key, attempt] : attempts_) {
    for (const auto& [number, rank] : attempt.ranks) {
      if (rank.stored.device() == device &&
          (Started(rank.stored) || rank.stored.state() == v1::STORED_RANK_STATE_EXITED)) {
        return true;
      }
    }
  }
  return false;
}

void DaemonCore::On(const AttemptPrepared& event) {
  Attempt* attempt = FindAttempt(event.attempt);
  if (attempt == nullptr) return;
  if (!event.status.ok()) {
    Refuse(event.attempt, *attempt,
           event.cause == v1::CAUSE_UNSPECIFIED ? v1::CAUSE_LAUNCH : event.cause,
           std::string(event.status.message()));
    return;
  }
  for (auto& [number, rank] : attempt->ranks) {
    if (rank.stored.state() != v1::STORED_RANK_STATE_ASSIGNED) continue;
    rank.stored.set_state(v1::STORED_RANK_STATE_PREPARED);
    PersistAttempt(event.attempt);
  }
}

// ---- rank processes -----------------------------------------------------------------------------

void DaemonCore::On(const RankStarted& event) {
  Rank* rank = Find(event.rank);
  if (rank == nullptr || !Started(rank->stored)) return;
  rank->attaching = false;
  rank->stored.set_state(v1::STORED_RANK_STATE_RUNNING);
  rank->stored.set_pid(event.pid);
  AddCommits(event.rank, event.commits);
  PersistAttempt(event.rank.attempt);
}

void DaemonCore::On(const RankNotStarted& event) {
  Rank* rank = Find(event.rank);
  if (rank == nullptr || !Started(rank->stored)) return;
  rank->attaching = false;
  if (rank->stored.state() == v1::STORED_RANK_STATE_RUNNING) {
    // It had run, and its run directory has lost all trace of it.
    v1::RankExit& exit = *rank->stored.mutable_exit();
    exit.set_cause(v1::CAUSE_UNKNOWN);
    exit.set_code(-1);
    exit.set_message(absl::StrCat(ToString(event.rank), " (pid ", rank->stored.pid(),
                                  ") is gone and its run directory does not say why"));
    return EnterExited(event.rank, *rank);
  }
  rank->stored.set_state(v1::STORED_RANK_STATE_PREPARED);
  PersistAttempt(event.rank.attempt);
  if (!event.why.ok()) {
    Refuse(event.rank.attempt, *FindAttempt(event.rank.attempt),
           event.cause == v1::CAUSE_UNSPECIFIED ? v1::CAUSE_LAUNCH : event.cause,
           std::string(event.why.message()));
  }
}

void DaemonCore::On(const RankExited& event) {
  Rank* rank = Find(event.rank);
  if (rank == nullptr || !Started(rank->stored)) return;
  if (event.pid != 0) rank->stored.set_pid(event.pid);
  v1::RankExit& exit = *rank->stored.mutable_exit();
  exit = event.exit;
  if (exit.signal() != 0 && (rank->killed || rank->kill_at.has_value())) {
    exit.set_cause(v1::CAUSE_CANCELLED);
    exit.set_message(absl::StrCat(ToString(event.rank), " was ended by signal ", exit.signal(),
                                  " as the coordinator asked"));
  }
  if (event.progress.has_value()) rank->progress = *event.progress;
  *rank->stored.mutable_progress() = rank->progress;
  AddCommits(event.rank, event.commits);
  EnterExited(event.rank, *rank);
}

void DaemonCore::On(const ReleaseProven& event) {
  Rank* rank = Find(event.rank);
  if (rank == nullptr || rank->stored.state() != v1::STORED_RANK_STATE_EXITED) return;
  rank->stored.set_state(v1::STORED_RANK_STATE_RELEASED);
  PersistAttempt(event.rank.attempt);
}

void DaemonCore::On(const TimerFired&) {
  armed_ = absl::InfiniteFuture();
  if (session_.has_value() && !welcomed_ && now_ >= welcome_deadline_) {
    welcome_deadline_ = absl::InfiniteFuture();
    Act(Reconnect{*session_, absl::StrCat("the coordinator did not welcome this worker within ",
                                          absl::FormatDuration(config_.welcome_timeout))});
  }
  if (welcomed_) SendCommits();
}

// ---- requests of ranks --------------------------------------------------------------------------

void DaemonCore::On(const RankCall& event) {
  std::visit([&](const auto& request) { Serve(event.call, request); }, event.request);
}

void DaemonCore::On(const RankCallCancelled& event) {
  // Its caller repeats a put. A get goes on: another caller may ask for its key soon.
  for (auto put = puts_.begin(); put != puts_.end(); ++put) {
    if (put->second.call != event.call) continue;
    puts_.erase(put);
    break;
  }
  for (auto& [key, pending] : gets_) pending.calls.erase(event.call);
  for (PendingNotice& pending : notices_) {
    if (pending.call == event.call) pending.call = CallId();
  }
}

absl::StatusOr<DaemonCore::Attempt*> DaemonCore::Authorize(const v1::RankIdentity& identity) {
  const RankKey key{KeyOf(identity), identity.rank()};
  Attempt* attempt = FindAttempt(key.attempt);
  if (attempt == nullptr || attempt->stored.stale() || attempt->ranks.count(key.rank) == 0) {
    return absl::AbortedError(absl::StrCat("worker ", config_.hello.worker(), " does not hold ",
                                           ToString(key), ": the attempt is over"));
  }
  return attempt;
}

void DaemonCore::Serve(CallId call, const v1::ReportRequest& request) {
  absl::StatusOr<Attempt*> attempt = Authorize(request.identity());
  if (!attempt.ok()) return Fail(call, attempt.status());
  Rank& rank = (*attempt)->ranks.at(request.identity().rank());
  if (!Exited(rank.stored)) {
    const v1::RankState before = ReportedState(rank.stored, rank.progress);
    rank.progress = request.progress();
    progress_changed_ = true;
    if (ReportedState(rank.stored, rank.progress) != before) state_changed_ = true;
  }
  v1::ReportResponse response;
  response.set_stop((*attempt)->stored.phase() == v1::DESIRED_PHASE_STOPPED);
  response.set_last_committed_step((*attempt)->stored.last_committed_step());
  response.set_collectives(rank.collectives);
  Reply(call, std::move(response));
}

void DaemonCore::Serve(CallId call, const v1::PutRequest& request) {
  absl::StatusOr<Attempt*> attempt = Authorize(request.identity());
  if (!attempt.ok()) return Fail(call, attempt.status());
  if ((*attempt)->stored.phase() == v1::DESIRED_PHASE_STOPPED) {
    return Fail(call, absl::AbortedError("the attempt is being stopped"));
  }
  if (request.key().size() > kKeyBytesMax || request.value().size() > kValueBytesMax) {
    return Fail(call, absl::InvalidArgumentError(
                          absl::StrCat("a bootstrap key has at most ", kKeyBytesMax,
                                       " bytes and its value ", kValueBytesMax, "; got ",
                                       request.key().size(), " and ", request.value().size())));
  }
  if (puts_.size() + gets_.size() >= kKeyValueCallsMax) {
    return Fail(call, absl::UnavailableError("too many bootstrap calls wait; try again"));
  }
  const uint64_t id = next_request_++;
  PendingPut& pending = puts_[id];
  pending.call = call;
  pending.put.set_request(id);
  pending.put.set_job_id(request.identity().job_id());
  pending.put.set_epoch(request.identity().epoch());
  pending.put.set_key(request.key());
  pending.put.set_value(request.value());
  if (!welcomed_) return;
  v1::FromWorker message;
  *message.mutable_put() = pending.put;
  Send(std::move(message));
}

void DaemonCore::Serve(CallId call, const v1::GetRequest& request) {
  absl::StatusOr<Attempt*> attempt = Authorize(request.identity());
  if (!attempt.ok()) return Fail(call, attempt.status());
  if ((*attempt)->stored.phase() == v1::DESIRED_PHASE_STOPPED) {
    return Fail(call, absl::AbortedError("the attempt is being stopped"));
  }
  if (request.key().size() > kKeyBytesMax) {
    return Fail(call, absl::InvalidArgumentError(
                          absl::StrCat("a bootstrap key has at most ", kKeyBytesMax, " bytes")));
  }
  if (puts_.size() + gets_.size() >= kKeyValueCallsMax) {
    return Fail(call, absl::UnavailableError("too many bootstrap calls wait; try again"));
  }
  const GetKey key(KeyOf(request.identity()), request.key());
  PendingGet& pending = gets_[key];
  pending.calls.insert(call);
  if (pending.request != 0) return;
  pending.request = next_request_++;
  if (welcomed_) SendGet(key, pending);
}

void DaemonCore::Serve(CallId call, const v1::CommitRequest& request) {
  absl::StatusOr<Attempt*> attempt = Authorize(request.identity());
  if (!attempt.ok()) return Fail(call, attempt.status());
  const AttemptKey key = KeyOf(request.identity());
  const int64_t step = request.checkpoint().step();
  if (step <= 0) {
    return Fail(call, absl::InvalidArgumentError(
                          absl::StrCat("a checkpoint of step ", step, " cannot be committed")));
  }
  if (commits_.size() >= kCommitsMax) {
    return Fail(call, absl::UnavailableError("too many commits wait for a verdict; try again"));
  }
  AddCommit(key, request.checkpoint());
  Reply(call, v1::CommitResponse());
  if (welcomed_) SendCommits();
}

void DaemonCore::AddCommit(const AttemptKey& key, const v1::CheckpointRecord& checkpoint) {
  PendingCommit& pending = commits_[{key, checkpoint.step()}];
  pending.commit.set_job_id(key.job.value());
  pending.commit.set_epoch(key.epoch.value());
  *pending.commit.mutable_checkpoint() = checkpoint;
  pending.commit.mutable_checkpoint()->set_epoch(key.epoch.value());
  output_->records.push_back(
      {CommitRecordName(key, checkpoint.step()), pending.commit.SerializeAsString()});
}

void DaemonCore::AddCommits(const RankKey& key, const std::vector<v1::CheckpointRecord>& commits) {
  const Attempt* attempt = FindAttempt(key.attempt);
  for (const v1::CheckpointRecord& checkpoint : commits) {
    // What was answered before is not asked again; the bound holds whatever the directory says.
    if (checkpoint.step() <= attempt->stored.last_committed_step()) continue;
    if (commits_.count({key.attempt, checkpoint.step()}) > 0) continue;
    if (commits_.size() < kCommitsMax) AddCommit(key.attempt, checkpoint);
  }
  if (welcomed_) SendCommits();
}

void DaemonCore::Serve(CallId call, const v1::NotifyRequest& request) {
  absl::StatusOr<Attempt*> attempt = Authorize(request.identity());
  if (!attempt.ok()) return Fail(call, attempt.status());
  v1::RankNotice notice;
  notice.set_job_id(request.identity().job_id());
  notice.set_epoch(request.identity().epoch());
  notice.set_rank(request.identity().rank());
  switch (request.kind_case()) {
    case v1::NotifyRequest::kDamaged:
      *notice.mutable_damaged() = request.damaged();
      break;
    case v1::NotifyRequest::kRemoved:
      *notice.mutable_removed() = request.removed();
      break;
    case v1::NotifyRequest::kEvaluation:
      *notice.mutable_evaluation() = request.evaluation();
      break;
    case v1::NotifyRequest::KIND_NOT_SET:
      return Fail(call, absl::InvalidArgumentError("the notice is empty"));
  }
  // Without a session the caller waits: should this daemon die first, it will ask the next one.
  if (!welcomed_) {
    if (notices_.size() >= kNoticesMax) {
      return Fail(call, absl::UnavailableError("too many notices wait; try again"));
    }
    notices_.push_back({call, std::move(notice)});
    return;
  }
  v1::FromWorker message;
  *message.mutable_notice() = std::move(notice);
  Send(std::move(message));
  Reply(call, v1::NotifyResponse());
}

void DaemonCore::EndCalls(const AttemptKey& key, absl::string_view why) {
  const absl::Status status = absl::AbortedError(absl::StrCat(ToString(key), " ", why));
  for (auto put = puts_.begin(); put != puts_.end();) {
    if (KeyOf(put->second.put) == key) {
      Fail(put->second.call, status);
      put = puts_.erase(put);
    } else {
      ++put;
    }
  }
  for (auto get = gets_.begin(); get != gets_.end();) {
    if (get->first.first == key) {
      for (const CallId call : get->second.calls) Fail(call, status);
      get = gets_.erase(get);
    } else {
      ++get;
    }
  }
}

// ---- output -------------------------------------------------------------------------------------

DaemonCore::Rank* DaemonCore::Find(const RankKey& key) {
  Attempt* attempt = FindAttempt(key.attempt);
  if (attempt == nullptr) return nullptr;
  auto rank = attempt->ranks.find(key.rank);
  return rank == attempt->ranks.end() ? nullptr : &rank->second;
}

DaemonCore::Attempt* DaemonCore::FindAttempt(const AttemptKey& key) {
  auto attempt = attempts_.find(key);
  return attempt == attempts_.end() ? nullptr : &attempt->second;
}

bool DaemonCore::HasPendingCommits(const AttemptKey& key) const {
  const auto first = commits_.lower_bound({key, INT64_MIN});
  return first != commits_.end() && first->first.first == key;
}

// Every change of an attempt that others may see is durable, so this also wakes the reporter.
void DaemonCore::PersistAttempt(const AttemptKey& key) {
  dirty_.insert(key);
  state_changed_ = true;
}

void DaemonCore::SendCommits() {
  for (auto& [key, pending] : commits_) {
    if (pending.sent_at.has_value() && now_ - *pending.sent_at < config_.commit_resend_interval) {
      continue;
    }
    pending.sent_at = now_;
    v1::FromWorker message;
    *message.mutable_commit() = pending.commit;
    Send(std::move(message));
  }
}

void DaemonCore::SendGet(const GetKey& key, const PendingGet& get) {
  v1::FromWorker message;
  message.mutable_get()->set_request(get.request);
  message.mutable_get()->set_job_id(key.first.job.value());
  message.mutable_get()->set_epoch(key.first.epoch.value());
  message.mutable_get()->set_key(key.second);
  Send(std::move(message));
}

v1::Observed DaemonCore::Observe() const {
  v1::Observed observed;
  observed.set_applied_revision(applied_revision_.value_or(0));
  for (const auto& [key, attempt] : attempts_) {
    v1::ObservedAttempt& out = *observed.add_attempts();
    out.set_job_id(key.job.value());
    out.set_epoch(key.epoch.value());
    out.set_refusal(attempt.stored.refusal());
    out.set_refusal_cause(attempt.stored.refusal_cause());
    const bool hide_exits = HasPendingCommits(key);
    for (const auto& [number, rank] : attempt.ranks) {
      v1::ObservedRank& row = *out.add_ranks();
      row.set_rank(number);
      row.set_pid(rank.stored.pid());
      *row.mutable_progress() = rank.progress;
      row.mutable_progress()->set_metrics_address(Reachable(rank.progress.metrics_address()));
      if (hide_exits && rank.stored.has_exit()) {
        row.set_state(Trains(rank.progress) ? v1::RANK_STATE_TRAINING : v1::RANK_STATE_RUNNING);
        continue;
      }
      row.set_state(ReportedState(rank.stored, rank.progress));
      if (rank.stored.has_exit()) *row.mutable_exit() = rank.stored.exit();
    }
  }
  return observed;
}

void DaemonCore::SendObserved() {
  observed_at_ = now_;
  state_changed_ = false;
  progress_changed_ = false;
  v1::FromWorker message;
  *message.mutable_observed() = Observe();
  Send(std::move(message));
}

void DaemonCore::Send(v1::FromWorker message) {
  CHECK(session_.has_value());
  message.set_incarnation(config_.incarnation.value());
  Act(SendToCoordinator{*session_, std::move(message)});
}

void DaemonCore::Reply(CallId call, RankResponse response) {
  if (call == CallId()) return;
  Act(ReplyToRank{call, std::move(response)});
}

void DaemonCore::Fail(CallId call, absl::Status status) {
  if (call == CallId()) return;
  Act(ReplyToRank{call, std::move(status)});
}

absl::Time DaemonCore::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  if (session_.has_value() && !welcomed_) next = welcome_deadline_;
  if (welcomed_) {
    next =
        observed_at_ + (progress_changed_ ? std::min(config_.progress_interval, heartbeat_interval_)
                                          : heartbeat_interval_);
    for (const auto& [key, pending] : commits_) {
      if (pending.sent_at.has_value()) {
        next = std::min(next, *pending.sent_at + config_.commit_resend_interval);
      }
    }
  }
  for (const auto& [key, attempt] : attempts_) {
    for (const auto& [number, rank] : attempt.ranks) {
      if (rank.stored.state() == v1::STORED_RANK_STATE_RUNNING && rank.kill_at.has_value() &&
          !rank.killed) {
        next = std::min(next, *rank.kill_at);
      }
    }
  }
  return next;
}

void DaemonCore::Finish() {
  for (const AttemptKey& key : dirty_) {
    const auto found = attempts_.find(key);
    if (found == attempts_.end()) {
      output_->records.push_back({AttemptRecordName(key), std::nullopt});
      continue;
    }
    v1::StoredAttempt stored = found->second.stored;
    for (const auto& [number, rank] : found->second.ranks) *stored.add_ranks() = rank.stored;
    output_->records.push_back({AttemptRecordName(key), stored.SerializeAsString()});
  }
  dirty_.clear();
  if (welcomed_) {
    const absl::Duration due = progress_changed_
                                   ? std::min(config_.progress_interval, heartbeat_interval_)
                                   : heartbeat_interval_;
    if (state_changed_ || now_ - observed_at_ >= due) SendObserved();
  }
  const absl::Time next = NextDeadline();
  if (next != armed_ && next != absl::InfiniteFuture()) {
    armed_ = next;
    Act(ArmTimer{next});
  }
  output_ = nullptr;
}

// ---- reads --------------------------------------------------------------------------------------

DaemonSummary DaemonCore::Summary() const {
  DaemonSummary summary;
  summary.session_welcomed = welcomed_;
  summary.attempts = static_cast<int>(attempts_.size());
  summary.commits_pending = static_cast<int>(commits_.size());
  summary.key_value_pending = static_cast<int>(puts_.size() + gets_.size());
  for (const auto& [key, attempt] : attempts_) {
    for (const auto& [number, rank] : attempt.ranks) {
      ++summary.ranks[ReportedState(rank.stored, rank.progress)];
      if (rank.stored.state() != v1::STORED_RANK_STATE_RELEASED) ++summary.slots_used;
    }
  }
  return summary;
}

std::set<std::string> DaemonCore::HeldDirectories() const {
  std::set<std::string> names;
  for (const auto& [key, attempt] : attempts_) names.insert(DirectoryName(key));
  return names;
}

absl::Status DaemonCore::AskForCollectives(const RankKey& key, uint64_t number) {
  const auto attempt = attempts_.find(key.attempt);
  if (attempt != attempts_.end()) {
    const auto rank = attempt->second.ranks.find(key.rank);
    if (rank != attempt->second.ranks.end() && !Exited(rank->second.stored)) {
      rank->second.collectives = number;
      return absl::OkStatus();
    }
  }
  return absl::FailedPreconditionError("the rank does not run here");
}

std::optional<v1::RankExit> DaemonCore::ExitOf(const RankKey& key) const {
  const auto attempt = attempts_.find(key.attempt);
  if (attempt == attempts_.end()) return std::nullopt;
  const auto rank = attempt->second.ranks.find(key.rank);
  if (rank == attempt->second.ranks.end() || !rank->second.stored.has_exit()) return std::nullopt;
  return rank->second.stored.exit();
}

std::string DaemonCore::DeviceOf(const RankKey& key) const {
  const auto attempt = attempts_.find(key.attempt);
  if (attempt == attempts_.end()) return "";
  const auto rank = attempt->second.ranks.find(key.rank);
  return rank == attempt->second.ranks.end() ? "" : rank->second.stored.device();
}

std::vector<std::string> DaemonCore::CheckInvariants() const {
  std::vector<std::string> broken;
  std::map<std::string, RankKey> holders;
  for (const auto& [key, attempt] : attempts_) {
    for (const auto& [number, rank] : attempt.ranks) {
      const RankKey rank_key{key, number};
      // A rank that never ran passes through EXITED too, without ever holding its device.
      const bool holds =
          Started(rank.stored) ||
          (rank.stored.state() == v1::STORED_RANK_STATE_EXITED && rank.stored.pid() != 0);
      if (!holds) continue;
      const auto [holder, first] = holders.emplace(rank.stored.device(), rank_key);
      if (!first) {
        broken.push_back(absl::StrCat("device ", rank.stored.device(), " is held by ",
                                      ToString(holder->second), " and ", ToString(rank_key)));
      }
    }
  }
  const auto check_calls = [&](const AttemptKey& key) {
    const auto found = attempts_.find(key);
    if (found == attempts_.end() || found->second.stored.stale() ||
        found->second.stored.phase() == v1::DESIRED_PHASE_STOPPED) {
      broken.push_back(absl::StrCat("a bootstrap call of ", ToString(key), " waits in vain"));
    }
  };
  for (const auto& [request, pending] : puts_) check_calls(KeyOf(pending.put));
  for (const auto& [key, pending] : gets_) check_calls(key.first);
  if (armed_ > NextDeadline()) broken.push_back("a deadline has no timer");
  return broken;
}

}  // namespace muster::worker
