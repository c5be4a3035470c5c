#include "worker/daemon/core/daemon_core.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

constexpr char kClusterRecord[] = "cluster";
constexpr char kIdentityRecord[] = "identity";
// 1: takes the spec and the checkpoints of an attempt from DesiredAttempt. 2: runs commands. 3:
// knows memberships. 4: shares devices. 5: keeps the spec of an attempt where a Desired has none.
constexpr uint32_t kProtocolVersion = 5;

}  // namespace

DaemonCore::DaemonCore(DaemonCoreConfig config)
    : config_(std::move(config)),
      commits_(config_.commit_resend_interval, outbox_),
      calls_(outbox_),
      reconciler_(config_, attempts_, commits_, calls_, outbox_),
      heartbeat_interval_(config_.heartbeat_interval) {}

absl::StatusOr<std::unique_ptr<DaemonCore>> DaemonCore::Recover(
    DaemonCoreConfig config, const std::map<std::string, std::string>& records, absl::Time now,
    DaemonOutput* output) {
  std::unique_ptr<DaemonCore> core(new DaemonCore(std::move(config)));
  RETURN_IF_ERROR(core->Load(records));
  core->outbox_.Begin(now, output);
  core->Identify();
  core->reconciler_.Recover();
  core->Finish();
  return core;
}

absl::Status DaemonCore::Load(const std::map<std::string, std::string>& records) {
  for (const auto& [name, value] : records) {
    bool read = false;
    if (name == kClusterRecord) {
      read = cluster_.ParseFromString(value);
      if (cluster_.history_term() != cluster_.leader_term()) cluster_.clear_history_id();
    } else if (name == kIdentityRecord) {
      read = identity_.ParseFromString(value);
    } else if (absl::StartsWith(name, AttemptTable::kRecordPrefix)) {
      read = attempts_.Load(value);
    } else if (absl::StartsWith(name, CommitQueue::kRecordPrefix)) {
      read = commits_.Load(value);
    }
    if (!read) {
      return absl::DataLossError(absl::StrCat("record ", name, " of the daemon cannot be read"));
    }
  }
  return absl::OkStatus();
}

void DaemonCore::Identify() {
  if (identity_.identity().empty()) {
    identity_.set_identity(config_.new_identity);
    identity_.set_incarnation(config_.first_incarnation.value());
  } else {
    identity_.set_incarnation(identity_.incarnation() + 1);
  }
  outbox_.Write(kIdentityRecord, identity_.SerializeAsString());
  outbox_.SetIncarnation(incarnation());
}

DaemonOutput DaemonCore::Handle(const DaemonEvent& event, absl::Time now) {
  DaemonOutput output;
  outbox_.Begin(now, &output);
  std::visit([this](const auto& e) { On(e); }, event);
  reconciler_.Converge();
  Finish();
  return output;
}

// ---- session ------------------------------------------------------------------------------------

void DaemonCore::On(const SessionUp& event) {
  outbox_.OpenSession(event.session);
  welcome_deadline_ = outbox_.now() + config_.welcome_timeout;
  applied_revision_.reset();
  commits_.BeginSession();
  if (!event.address.empty()) {
    config_.hello.set_address(event.address);
    config_.hello.set_outside_address(event.outside_address);
  }
  v1::FromWorker message;
  *message.mutable_hello() = config_.hello;
  message.mutable_hello()->set_metrics_address(Reachable(config_.hello.metrics_address()));
  message.mutable_hello()->set_cluster_id(cluster_.cluster_id());
  message.mutable_hello()->set_history_id(cluster_.history_id());
  message.mutable_hello()->set_leader_term(cluster_.leader_term());
  message.mutable_hello()->set_identity(identity_.identity());
  message.mutable_hello()->set_protocol_version(kProtocolVersion);
  *message.mutable_hello()->mutable_observed() = Observe();
  outbox_.Send(std::move(message));
}

void DaemonCore::On(const SessionDown& event) {
  if (outbox_.session() == event.session) outbox_.CloseSession();
}

void DaemonCore::On(const DeviceFailed& event) {
  for (v1::Device& device : *config_.hello.mutable_devices()) {
    if (device.name() != event.device || !device.unusable().empty()) continue;
    device.set_unusable(event.why);
    if (outbox_.session().has_value()) {
      outbox_.Act(Reconnect{*outbox_.session(),
                            absl::StrCat("device ", event.device, " failed: ", event.why)});
    }
  }
}

bool DaemonCore::AcceptLeader(const CoordinatorMessage& event) {
  if (outbox_.session() != event.session) return false;  // late, of a stream that is gone
  const v1::FromCoordinator& message = event.message;
  if (!cluster_.cluster_id().empty() && message.cluster_id() != cluster_.cluster_id()) {
    outbox_.Act(Reconnect{event.session,
                          absl::StrCat("the coordinator belongs to cluster ", message.cluster_id(),
                                       ", this worker to ", cluster_.cluster_id())});
    return false;
  }
  if (message.leader_term() < cluster_.leader_term()) {
    outbox_.Act(Reconnect{event.session, absl::StrCat("the coordinator's leader term ",
                                                      message.leader_term(), " is older than ",
                                                      cluster_.leader_term(), ", which was seen")});
    return false;
  }
  const std::string& history = message.history_id();
  const bool other_history = !history.empty() && history != cluster_.history_id();
  if (message.leader_term() == cluster_.leader_term() && other_history &&
      !cluster_.history_id().empty()) {
    outbox_.Act(Reconnect{
        event.session,
        absl::StrCat("the coordinator's leader term ", message.leader_term(), " of history ",
                     history, " is one that was seen of history ", cluster_.history_id(),
                     ": it runs on another copy of the cluster's state")});
    return false;
  }
  if (message.leader_term() > cluster_.leader_term() || cluster_.cluster_id().empty() ||
      other_history) {
    // A higher term may be of a version that has no history: what was obeyed before it says nothing
    // of that term.
    cluster_.set_cluster_id(message.cluster_id());
    cluster_.set_leader_term(message.leader_term());
    cluster_.set_history_id(history);
    cluster_.set_history_term(message.leader_term());
    outbox_.Write(kClusterRecord, cluster_.SerializeAsString());
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
      return calls_.Answer(message.value());
    case v1::FromCoordinator::kVerdict:
      return OnVerdict(message.verdict());
    case v1::FromCoordinator::kLog:  // the daemon answers these itself
    case v1::FromCoordinator::kCollectives:
    case v1::FromCoordinator::kProfile:
    case v1::FromCoordinator::KIND_NOT_SET:
      return;
  }
}

void DaemonCore::OnWelcome(const v1::Welcome& welcome) {
  if (outbox_.welcomed()) return;
  outbox_.SetWelcomed();
  welcome_deadline_ = absl::InfiniteFuture();
  if (welcome.heartbeat_interval_ms() > 0) {
    heartbeat_interval_ = absl::Milliseconds(welcome.heartbeat_interval_ms());
  }
  // Commits go first: an exit in the Observed that follows would end the attempt, and with it the
  // chance of its last checkpoint.
  commits_.SendDue();
  state_changed_ = true;
  calls_.SendAll();
}

void DaemonCore::OnDesired(const v1::Desired& desired) {
  if (applied_revision_.has_value() && desired.revision() <= *applied_revision_) return;
  applied_revision_ = desired.revision();
  state_changed_ = true;  // the next Observed acknowledges the revision
  reconciler_.SetDesired(desired);
}

void DaemonCore::OnVerdict(const v1::CheckpointVerdict& verdict) {
  const AttemptKey key = KeyOf(verdict);
  if (!commits_.Resolve(key, verdict.step())) return;
  state_changed_ = true;  // an exit may have waited for this
  AttemptState* attempt = attempts_.Find(key);
  if (attempt == nullptr || verdict.status_code() != 0) return;
  if (verdict.step() > attempt->stored.last_committed_step()) {
    attempt->stored.set_last_committed_step(verdict.step());
    attempts_.MarkChanged(key);
  }
}

void DaemonCore::On(const TimerFired&) {
  armed_ = absl::InfiniteFuture();
  if (outbox_.welcomed()) return commits_.SendDue();
  if (outbox_.session().has_value() && outbox_.now() >= welcome_deadline_) {
    welcome_deadline_ = absl::InfiniteFuture();
    outbox_.Act(Reconnect{*outbox_.session(),
                          absl::StrCat("the coordinator did not welcome this worker within ",
                                       absl::FormatDuration(config_.welcome_timeout))});
  }
}

// ---- requests of ranks --------------------------------------------------------------------------

void DaemonCore::On(const RankCall& event) {
  std::visit(
      [&](const auto& request) {
        if (Authorize(event.call, request.identity())) Serve(event.call, request);
      },
      event.request);
}

void DaemonCore::On(const RankCallCancelled& event) { calls_.Cancel(event.call); }

bool DaemonCore::Authorize(CallId call, const v1::RankIdentity& identity) {
  const RankKey key{KeyOf(identity), identity.rank()};
  const AttemptState* attempt = attempts_.Find(key.attempt);
  if (attempt != nullptr && !attempt->stored.stale() && attempt->ranks.count(key.rank) > 0) {
    return true;
  }
  outbox_.Fail(call,
               absl::AbortedError(absl::StrCat("worker ", config_.hello.worker(), " does not hold ",
                                               ToString(key), ": the attempt is over")));
  return false;
}

bool DaemonCore::RefuseWhileStopping(CallId call, const v1::RankIdentity& identity) {
  const AttemptState* attempt = attempts_.Find(KeyOf(identity));
  if (attempt->stored.phase() != v1::DESIRED_PHASE_STOPPED) return false;
  outbox_.Fail(call, absl::AbortedError("the attempt is being stopped"));
  return true;
}

bool DaemonCore::RefuseEarlierMembership(CallId call, const v1::RankIdentity& identity) {
  const AttemptState* attempt = attempts_.Find(KeyOf(identity));
  const uint32_t membership = std::max<uint32_t>(1, identity.membership());
  if (membership == attempt->membership()) return false;
  outbox_.Fail(call, absl::UnavailableError(absl::StrCat(
                         "membership ", membership, " was replaced by ", attempt->membership())));
  return true;
}

void DaemonCore::Serve(CallId call, const v1::ReportRequest& request) {
  const AttemptKey key = KeyOf(request.identity());
  const AttemptState& attempt = *attempts_.Find(key);
  RankState& rank = *attempts_.Find(RankKey{key, request.identity().rank()});
  // What a rank of an earlier membership does says nothing of the current one.
  const bool current =
      std::max<uint32_t>(1, request.identity().membership()) == attempt.membership();
  if (!Exited(rank) && current) {
    if (std::max<uint32_t>(1, rank.stored.membership()) != attempt.membership()) {
      rank.stored.set_membership(attempt.membership());
      attempts_.MarkChanged(key);
    }
    const v1::RankState before = ReportedState(rank);
    rank.progress = request.progress();
    progress_changed_ = true;
    if (ReportedState(rank) != before) state_changed_ = true;
  }
  v1::ReportResponse response;
  response.set_stop(attempt.stored.phase() == v1::DESIRED_PHASE_STOPPED);
  response.set_last_committed_step(attempt.stored.last_committed_step());
  response.set_collectives(rank.collectives);
  response.set_membership(rank.told_membership);
  outbox_.Reply(call, std::move(response));
}

void DaemonCore::Serve(CallId call, const v1::PutRequest& request) {
  if (RefuseWhileStopping(call, request.identity())) return;
  if (!RefuseEarlierMembership(call, request.identity())) calls_.Put(call, request);
}

void DaemonCore::Serve(CallId call, const v1::GetRequest& request) {
  if (RefuseWhileStopping(call, request.identity())) return;
  if (!RefuseEarlierMembership(call, request.identity())) calls_.Get(call, request);
}

void DaemonCore::Serve(CallId call, const v1::NotifyRequest& request) {
  if (!RefuseEarlierMembership(call, request.identity())) calls_.Notify(call, request);
}

void DaemonCore::Serve(CallId call, const v1::CommitRequest& request) {
  const int64_t step = request.checkpoint().step();
  if (step <= 0) {
    return outbox_.Fail(call, absl::InvalidArgumentError(absl::StrCat("a checkpoint of step ", step,
                                                                      " cannot be committed")));
  }
  if (const size_t bytes = request.checkpoint().ByteSizeLong(); bytes > kCheckpointBytesMax) {
    return outbox_.Fail(call, absl::InvalidArgumentError(absl::StrCat(
                                  "the record of a checkpoint has at most ", kCheckpointBytesMax,
                                  " bytes; that of step ", step, " has ", bytes)));
  }
  if (commits_.full()) {
    return outbox_.Fail(call,
                        absl::UnavailableError("too many commits wait for a verdict; try again"));
  }
  commits_.Add(KeyOf(request.identity()), request.checkpoint());
  outbox_.Reply(call, v1::CommitResponse());
  if (outbox_.welcomed()) commits_.SendDue();
}

// ---- reports and timers -------------------------------------------------------------------------

std::string DaemonCore::Reachable(const std::string& listening) const {
  const v1::Hello& hello = config_.hello;
  return Advertised(listening,
                    hello.outside_address().empty() ? hello.address() : hello.outside_address());
}

v1::Observed DaemonCore::Observe() const {
  v1::Observed observed;
  observed.set_applied_revision(applied_revision_.value_or(0));
  for (const auto& [key, attempt] : attempts_.all()) {
    v1::ObservedAttempt& out = *observed.add_attempts();
    out.set_job_id(key.job.value());
    out.set_epoch(key.epoch.value());
    out.set_history_id(attempt.stored.history_id());
    out.set_membership(attempt.membership());
    out.set_has_spec(attempt.spec.has_value());
    out.set_refusal(attempt.stored.refusal());
    out.set_refusal_cause(attempt.stored.refusal_cause());
    const bool hide_exits = commits_.Has(key);
    for (const auto& [number, rank] : attempt.ranks) {
      v1::ObservedRank& row = *out.add_ranks();
      row.set_rank(number);
      row.set_pid(rank.stored.pid());
      *row.mutable_progress() = rank.progress;
      row.mutable_progress()->set_metrics_address(Reachable(rank.progress.metrics_address()));
      if (hide_exits && rank.stored.has_exit()) {
        row.set_state(RunningState(rank));
        continue;
      }
      row.set_state(ReportedState(rank));
      if (rank.stored.has_exit()) *row.mutable_exit() = rank.stored.exit();
    }
  }
  return observed;
}

void DaemonCore::SendObserved() {
  observed_at_ = outbox_.now();
  state_changed_ = false;
  progress_changed_ = false;
  v1::FromWorker message;
  *message.mutable_observed() = Observe();
  outbox_.Send(std::move(message));
}

absl::Duration DaemonCore::ObservedInterval() const {
  return progress_changed_ ? std::min(config_.progress_interval, heartbeat_interval_)
                           : heartbeat_interval_;
}

absl::Time DaemonCore::NextDeadline() const {
  absl::Time next = reconciler_.NextDeadline();
  if (outbox_.welcomed()) {
    next = std::min({next, observed_at_ + ObservedInterval(), commits_.NextDeadline()});
  } else if (outbox_.session().has_value()) {
    next = std::min(next, welcome_deadline_);
  }
  return next;
}

void DaemonCore::Finish() {
  if (attempts_.WriteChanged(outbox_)) state_changed_ = true;
  if (outbox_.welcomed() &&
      (state_changed_ || outbox_.now() - observed_at_ >= ObservedInterval())) {
    SendObserved();
  }
  const absl::Time next = NextDeadline();
  if (next != armed_ && next != absl::InfiniteFuture()) {
    armed_ = next;
    outbox_.Act(ArmTimer{next});
  }
  outbox_.End();
}

// ---- reads --------------------------------------------------------------------------------------

DaemonSummary DaemonCore::Summary() const {
  DaemonSummary summary;
  summary.session_welcomed = outbox_.welcomed();
  summary.attempts = static_cast<int>(attempts_.all().size());
  for (const v1::Device& device : config_.hello.devices()) {
    if (device.unusable().empty()) ++summary.slots;
  }
  summary.commits_pending = commits_.size();
  summary.key_value_pending = static_cast<int>(calls_.key_value_pending());
  for (const auto& [key, attempt] : attempts_.all()) {
    for (const auto& [number, rank] : attempt.ranks) {
      ++summary.ranks[ReportedState(rank)];
      if (rank.stored.state() != v1::STORED_RANK_STATE_RELEASED) ++summary.slots_used;
    }
  }
  return summary;
}

std::set<std::string> DaemonCore::HeldDirectories() const {
  std::set<std::string> names;
  for (const auto& [key, attempt] : attempts_.all()) names.insert(DirectoryName(key));
  return names;
}

absl::Status DaemonCore::AskForCollectives(const RankKey& key, uint64_t number) {
  RankState* rank = attempts_.Find(key);
  if (rank == nullptr || Exited(*rank)) {
    return absl::FailedPreconditionError("the rank does not run here");
  }
  rank->collectives = number;
  return absl::OkStatus();
}

std::optional<v1::RankExit> DaemonCore::ExitOf(const RankKey& key) const {
  const RankState* rank = attempts_.Find(key);
  if (rank == nullptr || !rank->stored.has_exit()) return std::nullopt;
  return rank->stored.exit();
}

std::string DaemonCore::DeviceOf(const RankKey& key) const {
  const RankState* rank = attempts_.Find(key);
  return rank == nullptr ? "" : rank->stored.device();
}

std::vector<std::string> DaemonCore::CheckInvariants() const {
  std::vector<std::string> broken = attempts_.CheckInvariants();
  for (const AttemptKey& key : calls_.KeyValueAttempts()) {
    const auto found = attempts_.all().find(key);
    if (found == attempts_.all().end() || found->second.ending()) {
      broken.push_back(absl::StrCat("a bootstrap call of ", ToString(key), " waits in vain"));
    }
  }
  if (armed_ > NextDeadline()) broken.push_back("a deadline has no timer");
  return broken;
}

}  // namespace muster::worker
