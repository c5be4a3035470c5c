#include "worker/daemon/core/reconciler.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/spec/share.h"

namespace muster::worker {
namespace {

// Of the histories of the cluster in which two attempts began; a version that had none says
// nothing.
bool Differ(const std::string& history, const std::string& other) {
  return !history.empty() && !other.empty() && history != other;
}

}  // namespace

void Reconciler::Recover() {
  for (auto& [key, attempt] : attempts_.all()) {
    for (auto& [number, rank] : attempt.ranks) {
      const RankKey rank_key{key, number};
      if (Started(rank)) {
        rank.attaching = true;
        outbox_.Act(AttachRank{rank_key});
      } else if (rank.stored.state() == v1::STORED_RANK_STATE_EXITED) {
        outbox_.Act(VerifyRelease{rank_key});
      }
    }
  }
}

// ---- desired state ------------------------------------------------------------------------------

void Reconciler::SetDesired(const v1::Desired& desired) {
  std::set<AttemptKey> wanted;
  for (const v1::DesiredAttempt& attempt : desired.attempts()) {
    const AttemptKey key = KeyOf(attempt);
    // One of another history has the name of what is wanted, and nothing else of it: it has to be
    // forgotten first.
    const AttemptState* held = attempts_.Find(key);
    if (held != nullptr && Differ(held->stored.history_id(), attempt.history_id())) continue;
    wanted.insert(key);
    Adopt(key, attempt);
  }
  for (auto& [key, attempt] : attempts_.all()) {
    if (wanted.count(key) > 0 || attempt.stored.stale()) continue;
    attempt.stored.set_stale(true);
    attempts_.MarkChanged(key);
    calls_.EndAttempt(key, "is not wanted any more");
  }
}

void Reconciler::Adopt(const AttemptKey& key, const v1::DesiredAttempt& desired) {
  const bool known = attempts_.Find(key) != nullptr;
  AttemptState& attempt = attempts_.all()[key];
  if (attempt.stored.stale()) return;
  v1::StoredAttempt& stored = attempt.stored;
  if (!known) {
    stored.set_job_id(desired.job_id());
    stored.set_job_name(desired.job_name());
    stored.set_epoch(desired.epoch());
    stored.set_history_id(desired.history_id());
  }
  if (!TakeMembership(key, attempt, desired)) return;
  // Phases only advance within a membership.
  if (!known || desired.phase() > stored.phase() ||
      desired.stop_grace_ms() != stored.stop_grace_ms()) {
    stored.set_phase(std::max(stored.phase(), desired.phase()));
    stored.set_stop_grace_ms(desired.stop_grace_ms());
    attempts_.MarkChanged(key);
  }
  if (desired.has_spec()) {
    attempt.spec = desired.spec();
    attempt.restore = desired.restore();
  }
  for (const v1::RankAssignment& assignment : desired.ranks()) {
    RankState& rank = attempt.ranks[assignment.rank()];
    if (rank.stored.state() == v1::STORED_RANK_STATE_UNSPECIFIED) {
      rank.stored.set_rank(assignment.rank());
      rank.stored.set_device(assignment.device());
      rank.stored.set_state(v1::STORED_RANK_STATE_ASSIGNED);
      rank.stored.set_membership(attempt.membership());
      attempt.prepared_asked = false;
      attempts_.MarkChanged(key);
    }
    // A coordinator that does not know this daemon's version puts both into each assignment. One
    // that has not sent the spec yet wants the rank to wait for it, or it runs, or is to end.
    if (!attempt.spec.has_value() && !assignment.has_spec()) continue;
    rank.assignment = assignment;
    rank.assignment.set_owner(desired.owner());
    if (attempt.spec.has_value()) {
      *rank.assignment.mutable_spec() = *attempt.spec;
      *rank.assignment.mutable_restore() = attempt.restore;
    }
    const int32_t share = spec::ShareOf(rank.assignment.spec());
    if (rank.stored.state() == v1::STORED_RANK_STATE_ASSIGNED && share != ShareOf(rank.stored)) {
      rank.stored.set_share(share);
      attempts_.MarkChanged(key);
    }
    CompleteAssignment(key, rank.assignment);
  }
  if (stored.refusal().empty()) {
    const std::string why = WhyRefuse(desired);
    if (!why.empty()) Refuse(key, attempt, v1::CAUSE_LAUNCH, why);
  }
  if (stored.phase() == v1::DESIRED_PHASE_STOPPED) calls_.EndAttempt(key, "is being stopped");
}

bool Reconciler::TakeMembership(const AttemptKey& key, AttemptState& attempt,
                                const v1::DesiredAttempt& desired) {
  v1::StoredAttempt& stored = attempt.stored;
  const bool first = stored.phase() == v1::DESIRED_PHASE_UNSPECIFIED;
  const uint32_t membership = std::max<uint32_t>(1, desired.membership());
  if (!first && membership < attempt.membership()) {
    // A coordinator whose state was restored from a backup may end what it knows an earlier
    // membership of.
    if (desired.phase() == v1::DESIRED_PHASE_STOPPED && stored.phase() != desired.phase()) {
      stored.set_phase(desired.phase());
      attempts_.MarkChanged(key);
      calls_.EndAttempt(key, "is being stopped");
    }
    return false;
  }
  if (membership == stored.membership()) return true;
  const bool grows = !first && membership > attempt.membership();
  stored.set_membership(membership);
  attempts_.MarkChanged(key);
  if (!grows) return true;
  // Its ranks may be asked to wait for others again; what was stopped stays so.
  if (stored.phase() != v1::DESIRED_PHASE_STOPPED) stored.set_phase(desired.phase());
  calls_.EndMembership(key);
  for (auto& [number, rank] : attempt.ranks) {
    if (!Exited(rank)) rank.progress.Clear();
  }
  return true;
}

std::string Reconciler::WhyRefuse(const v1::DesiredAttempt& desired) const {
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

void Reconciler::Refuse(const AttemptKey& key, AttemptState& attempt, v1::Cause cause,
                        const std::string& why) {
  attempt.stored.set_refusal(why);
  attempt.stored.set_refusal_cause(cause == v1::CAUSE_UNSPECIFIED ? v1::CAUSE_LAUNCH : cause);
  attempts_.MarkChanged(key);
}

void Reconciler::CompleteAssignment(const AttemptKey& key, v1::RankAssignment& assignment) const {
  assignment.set_job_id(key.job.value());
  assignment.set_epoch(key.epoch.value());
  assignment.set_daemon_socket(config_.rank_socket);
  assignment.set_run_directory(
      absl::StrCat(config_.attempts_directory, "/", RunDirectoryName({key, assignment.rank()})));
  assignment.set_worker(config_.hello.worker());
  assignment.set_cache_directory(config_.cache_directory);
  assignment.set_metrics_address(config_.rank_metrics_address);
  if (!config_.rank_metrics_tls.certificate().empty()) {
    *assignment.mutable_metrics_tls() = config_.rank_metrics_tls;
  }
  assignment.set_rank_ports(config_.rank_ports);
  assignment.set_host_id(config_.hello.host_id());
  if (assignment.threads() <= 0) {
    assignment.set_threads(assignment.spec().resources().threads_per_rank());
  }
  const int32_t share = spec::ShareOf(assignment.spec());
  if (assignment.threads() <= 0) {
    const int64_t threads = int64_t{config_.threads_per_slot} * share / spec::kWholeDevice;
    assignment.set_threads(static_cast<int32_t>(std::max<int64_t>(1, threads)));
  }
  if (share == spec::kWholeDevice) return;
  for (const v1::Device& device : config_.hello.devices()) {
    if (device.name() != assignment.device() || device.kind() != v1::DEVICE_KIND_CUDA) continue;
    assignment.set_device_memory_limit_bytes(device.memory_bytes() / spec::kWholeDevice * share);
    assignment.set_mps(config_.mps);
  }
}

// ---- convergence --------------------------------------------------------------------------------

void Reconciler::Converge() {
  auto& attempts = attempts_.all();
  for (auto& [key, attempt] : attempts) ConvergeAttempt(key, attempt);
  for (auto it = attempts.begin(); it != attempts.end();) {
    const auto& ranks = it->second.ranks;
    const bool released = std::all_of(ranks.begin(), ranks.end(), [](const auto& entry) {
      return entry.second.stored.state() == v1::STORED_RANK_STATE_RELEASED;
    });
    if (!it->second.stored.stale() || !released) {
      ++it;
      continue;
    }
    attempts_.MarkChanged(it->first);
    outbox_.Act(AttemptForgotten{it->first});
    it = attempts.erase(it);
  }
}

void Reconciler::ConvergeAttempt(const AttemptKey& key, AttemptState& attempt) {
  if (attempt.ending()) {
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
        !attempts_.DeviceBusy(rank.stored)) {
      rank.stored.set_state(v1::STORED_RANK_STATE_STARTING);
      rank.stored.set_membership(attempt.membership());
      rank.stored.set_boot_id(config_.hello.boot_id());
      attempts_.MarkChanged(key);
      outbox_.Act(StartRank{{key, number}, rank.assignment});
    }
    if (rank.stored.state() == v1::STORED_RANK_STATE_RUNNING && !rank.attaching &&
        !rank.reassigning && rank.told_membership < attempt.membership() &&
        rank.assignment.membership() == attempt.membership()) {
      rank.reassigning = true;
      outbox_.Act(ReassignRank{{key, number}, rank.assignment});
    }
  }
  if (!prepare.ranks.empty() && !attempt.prepared_asked) {
    attempt.prepared_asked = true;
    outbox_.Act(std::move(prepare));
  }
}

void Reconciler::StopRank(const RankKey& key, const AttemptState& attempt, RankState& rank) {
  switch (rank.stored.state()) {
    case v1::STORED_RANK_STATE_ASSIGNED:
    case v1::STORED_RANK_STATE_PREPARED:
      return EnterExited(key, rank);
    case v1::STORED_RANK_STATE_RUNNING:
      break;
    default:
      return;  // an answer of the process host is due, or nothing is left to do
  }
  if (rank.attaching || rank.killed) return;
  const absl::Time now = outbox_.now();
  if (attempt.stored.stale() || (rank.kill_at.has_value() && now >= *rank.kill_at)) {
    rank.killed = true;
    outbox_.Act(SignalRank{key, /*kill=*/true});
  } else if (!rank.kill_at.has_value()) {
    const int64_t grace_ms = attempt.stored.stop_grace_ms();
    rank.kill_at = now + (grace_ms > 0 ? absl::Milliseconds(grace_ms) : config_.stop_grace);
    outbox_.Act(SignalRank{key, /*kill=*/false});
  }
}

// A rank that never ran comes here too: its release is verified like any other's, whatever may be
// on the machine in its name.
void Reconciler::EnterExited(const RankKey& key, RankState& rank) {
  rank.stored.set_state(v1::STORED_RANK_STATE_EXITED);
  rank.attaching = false;
  attempts_.MarkChanged(key.attempt);
  outbox_.Act(VerifyRelease{key});
}

absl::Time Reconciler::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, attempt] : attempts_.all()) {
    for (const auto& [number, rank] : attempt.ranks) {
      if (rank.stored.state() == v1::STORED_RANK_STATE_RUNNING && rank.kill_at.has_value() &&
          !rank.killed) {
        next = std::min(next, *rank.kill_at);
      }
    }
  }
  return next;
}

// ---- answers of the process host ----------------------------------------------------------------

void Reconciler::On(const AttemptPrepared& event) {
  AttemptState* attempt = attempts_.Find(event.attempt);
  if (attempt == nullptr) return;
  if (!event.status.ok()) {
    return Refuse(event.attempt, *attempt, event.cause, std::string(event.status.message()));
  }
  for (auto& [number, rank] : attempt->ranks) {
    if (rank.stored.state() != v1::STORED_RANK_STATE_ASSIGNED) continue;
    rank.stored.set_state(v1::STORED_RANK_STATE_PREPARED);
    attempts_.MarkChanged(event.attempt);
  }
}

void Reconciler::On(const RankStarted& event) {
  RankState* rank = attempts_.Find(event.rank);
  if (rank == nullptr || !Started(*rank)) return;
  rank->attaching = false;
  rank->stored.set_state(v1::STORED_RANK_STATE_RUNNING);
  rank->stored.set_pid(event.pid);
  AddCommits(event.rank, event.commits);
  attempts_.MarkChanged(event.rank.attempt);
}

void Reconciler::On(const RankNotStarted& event) {
  RankState* rank = attempts_.Find(event.rank);
  if (rank == nullptr || !Started(*rank)) return;
  rank->attaching = false;
  const std::string& boot = rank->stored.boot_id();
  if (event.why.ok() && !boot.empty() && boot != config_.hello.boot_id()) {
    // It may have run, and what it has left is lost with the machine's last boot.
    v1::RankExit& exit = *rank->stored.mutable_exit();
    exit.set_cause(v1::CAUSE_WORKER_LOST);
    exit.set_code(-1);
    exit.set_message(absl::StrCat(ToString(event.rank), " on worker ", config_.hello.worker(),
                                  " ended when the machine went down"));
    return EnterExited(event.rank, *rank);
  }
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
  attempts_.MarkChanged(event.rank.attempt);
  if (!event.why.ok()) {
    Refuse(event.rank.attempt, *attempts_.Find(event.rank.attempt), event.cause,
           std::string(event.why.message()));
  }
}

void Reconciler::On(const RankExited& event) {
  RankState* rank = attempts_.Find(event.rank);
  if (rank == nullptr || !Started(*rank)) return;
  if (event.pid != 0) rank->stored.set_pid(event.pid);
  v1::RankExit& exit = *rank->stored.mutable_exit();
  exit = event.exit;
  if (rank->killed || rank->kill_at.has_value()) {
    if (exit.signal() != 0) {
      exit.set_cause(v1::CAUSE_CANCELLED);
      exit.set_message(absl::StrCat(ToString(event.rank), " was ended by signal ", exit.signal(),
                                    " as the coordinator asked"));
    } else if (exit.cause() == v1::CAUSE_CRASH) {
      exit.set_cause(v1::CAUSE_CANCELLED);
      exit.set_message(absl::StrCat(ToString(event.rank), " exited with status ", exit.code(),
                                    " when the coordinator asked it to end"));
    }
  }
  const uint32_t membership = std::max<uint32_t>(1, rank->stored.membership());
  const AttemptState& attempt = *attempts_.Find(event.rank.attempt);
  const bool tells_of_itself = exit.cause() != v1::CAUSE_COMPLETED &&
                               exit.cause() != v1::CAUSE_COMMUNICATION &&
                               exit.cause() != v1::CAUSE_NETWORK;
  if (membership < attempt.membership() && !attempt.ending() && !tells_of_itself) {
    // It has not learnt that peers of it were replaced, and ended with them.
    exit.set_cause(v1::CAUSE_LAUNCH);
    exit.set_message(absl::StrCat(ToString(event.rank), " ended in membership ", membership,
                                  " before it could start anew in ", attempt.membership(), ": ",
                                  event.exit.message()));
    exit.clear_peer();
  }
  if (event.progress.has_value()) rank->progress = *event.progress;
  *rank->stored.mutable_progress() = rank->progress;
  AddCommits(event.rank, event.commits);
  EnterExited(event.rank, *rank);
}

void Reconciler::On(const RankReassigned& event) {
  RankState* rank = attempts_.Find(event.rank);
  if (rank == nullptr) return;
  rank->reassigning = false;
  if (Exited(*rank)) return;
  if (event.status.ok()) {
    rank->told_membership = std::max(rank->told_membership, event.membership);
    return;
  }
  Refuse(event.rank.attempt, *attempts_.Find(event.rank.attempt), v1::CAUSE_LAUNCH,
         std::string(event.status.message()));
}

void Reconciler::On(const ReleaseProven& event) {
  RankState* rank = attempts_.Find(event.rank);
  if (rank == nullptr || rank->stored.state() != v1::STORED_RANK_STATE_EXITED) return;
  rank->stored.set_state(v1::STORED_RANK_STATE_RELEASED);
  attempts_.MarkChanged(event.rank.attempt);
}

void Reconciler::AddCommits(const RankKey& key,
                            const std::vector<v1::CheckpointRecord>& checkpoints) {
  // Those up to last_committed_step have been answered before.
  commits_.AddMissing(key.attempt, checkpoints,
                      attempts_.Find(key.attempt)->stored.last_committed_step());
  if (outbox_.welcomed()) commits_.SendDue();
}

}  // namespace muster::worker
