#include <algorithm>

#include "absl/strings/str_cat.h"
#include "tests/sim/world.h"

namespace muster::sim {

using worker::RankKey;

namespace {

JobEpoch AttemptOf(const RankKey& key) {
  return {key.attempt.job.value(), key.attempt.epoch.value()};
}

uint32_t MembershipOf(const Process& process) {
  return std::max<uint32_t>(1, process.assignment.membership());
}

Members GangOf(const Process& process) { return {AttemptOf(process.key), MembershipOf(process)}; }

v1::RankIdentity IdentityOf(const Process& process) {
  v1::RankIdentity identity;
  identity.set_job_id(process.key.attempt.job.value());
  identity.set_epoch(process.key.attempt.epoch.value());
  identity.set_rank(process.key.rank);
  identity.set_membership(MembershipOf(process));
  return identity;
}

std::string CheckpointPath(const Members& gang, int64_t step) {
  return absl::StrCat("checkpoints/", gang.attempt.first, "/step-", step, ".e", gang.attempt.second,
                      ".m", gang.membership);
}

std::string AddressOf(const Members& gang) {
  return absl::StrCat("of epoch ", gang.attempt.second, " membership ", gang.membership);
}

}  // namespace

Process* World::Find(const RankKey& key, uint64_t generation) {
  for (auto& [name, machine] : machines_) {
    auto found = machine.processes.find(key);
    if (found == machine.processes.end()) continue;
    if (found->second.alive && found->second.generation == generation) return &found->second;
  }
  return nullptr;
}

std::vector<Process*> World::Gang(const Members& gang) {
  std::vector<Process*> found;
  for (auto& [name, machine] : machines_) {
    for (auto& [key, process] : machine.processes) {
      if (AttemptOf(key) == gang.attempt && MembershipOf(process) == gang.membership) {
        found.push_back(&process);
      }
    }
  }
  return found;
}

void World::StartAnew(Process& process) {
  Trace(absl::StrCat(process.worker, " ", ToString(process.key), " starts anew in membership ",
                     process.written.membership()));
  Count("started anew");
  if (process.written.membership() <= MembershipOf(process)) {
    Violate(absl::StrCat(ToString(process.key), " starts anew from membership ",
                         process.written.membership(), ", it was in ", MembershipOf(process)));
  }
  process.assignment = process.written;
  process.generation = next_id_++;
  process.progress.Clear();
  process.exit.Clear();
  process.bootstrapped = process.stopped = false;
  // A signal that came before is pending.
  if (process.terminating) return End(process, v1::CAUSE_CANCELLED, 0, 0, "asked to stop");
  Launch(machines_[process.worker], process);
}

void World::Launch(Machine& machine, Process& process) {
  const JobEpoch gang = AttemptOf(process.key);
  // One that a restore has forgotten may still start.
  const auto leap = leapt_.find(gang.first);
  const bool forgotten =
      leap != leapt_.end() && gang.second > leap->second.epoch && gang.second < leap->second.floor;
  uint64_t& newest = epochs_[gang.first];
  if (!forgotten) newest = std::max(newest, gang.second);
  // The rank restores the first candidate. Every candidate must have been saved completely.
  int64_t step = 0;
  for (const v1::CheckpointRecord& candidate : process.assignment.restore()) {
    if (saved_.count({candidate.path(), candidate.step()}) == 0) {
      Violate(absl::StrCat(ToString(process.key), " is to restore ", candidate.path(),
                           ", which was never written completely"));
    }
  }
  if (process.assignment.restore_size() > 0) step = process.assignment.restore(0).step();
  // A daemon that was stopped for long may be told so late that the attempt is over by then. What
  // it would commit is refused.
  const bool over = gang.second <= ended_epochs_[gang.first];
  if (step < committed_[gang.first] && !over) {
    Violate(absl::StrCat(ToString(process.key), " restores step ", step, ", but step ",
                         committed_[gang.first], " was committed"));
  }
  auto [restored, first] = restored_.emplace(gang, step);
  if (!first && restored->second != step) {
    Violate(absl::StrCat(ToString(process.key), " restores step ", step, ", its peers step ",
                         restored->second));
  }
  if (first && gang.second > 1) {
    CheckReplay(process, reached_[{gang.first, gang.second - 1}] - step);
  }
  process.step = step;
  const RankKey key = process.key;
  const uint64_t generation = process.generation;
  queue_.After(absl::Milliseconds(10 + rng_.Below(200)), [this, key, generation] {
    Process* p = Find(key, generation);
    if (p == nullptr) return;
    if (p->assignment.spec().labels().count("poisoned") > 0) {
      return End(*p, v1::CAUSE_USER_ERROR, 2, 0, "the spec cannot run");
    }
    p->progress.set_phase("bootstrapping");
    if (Disturbed() && key.rank > 0 && rng_.Chance(0.02)) {
      // Its preflight cannot reach rank 0, which has started already.
      for (Process* first : Gang(GangOf(*p))) {
        if (first->key.rank != 0 || !first->alive) continue;
        Count("preflight failed");
        return BreakLink(*p, *first, v1::CAUSE_LAUNCH);
      }
    }
    KeepReporting(key, generation);
    // The call before may have ended it.
    p = Find(key, generation);
    if (p == nullptr) return;
    const v1::RankIdentity identity = IdentityOf(*p);
    if (key.rank == 0) {
      v1::PutRequest put;
      *put.mutable_identity() = identity;
      put.set_key("address");
      put.set_value(AddressOf(GangOf(*p)));
      CallDaemon(key, generation, put);
    }
    v1::GetRequest get;
    *get.mutable_identity() = identity;
    get.set_key("address");
    CallDaemon(key, generation, get);
  });
}

void World::KeepReporting(const RankKey& key, uint64_t generation) {
  Process* process = Find(key, generation);
  if (process == nullptr || process->progress.step() > 0) return;
  Report(*process);
  queue_.After(absl::Milliseconds(500),
               [this, key, generation] { KeepReporting(key, generation); });
}

void World::TryStep(const Members& gang) {
  const std::vector<Process*> ranks = Gang(gang);
  if (ranks.empty()) return;
  const Process& any = *ranks.front();
  if (static_cast<int>(ranks.size()) != any.assignment.world_size()) return;
  for (const Process* process : ranks) {
    if (!process->alive || !process->bootstrapped || process->step != any.step) return;
  }
  if (any.step == any.assignment.spec().engine().training().steps()) {
    return Finish(gang);  // restored from the checkpoint of the last step
  }
  // A collective that never ends.
  const double hangs = options_.day() ? 0.0001 : 0.004;
  if (options_.faults == Faults::kAll && faults_on_ && any.step > 0 && rng_.Chance(hangs)) {
    return Count("gang hung");
  }
  const int64_t next = any.step + 1;
  const uint64_t least_ms = options_.day() ? 4000 : 40;
  queue_.After(absl::Milliseconds(least_ms + rng_.Below(2 * least_ms)),
               [this, gang, next] { FinishStep(gang, next); });
}

void World::FinishStep(const Members& gang, int64_t step) {
  const std::vector<Process*> ranks = Gang(gang);
  // A rank is gone with the disk of its machine.
  if (ranks.empty() || static_cast<int>(ranks.size()) != ranks.front()->assignment.world_size()) {
    return;
  }
  for (const Process* process : ranks) {
    // A rank died during the step: the others wait in a collective.
    if (!process->alive || process->step != step - 1) return;
  }
  reached_[gang.attempt] = step;
  const v1::JobSpec& spec = ranks.front()->assignment.spec();
  const bool last = step == spec.engine().training().steps();
  for (Process* process : ranks) {
    process->step = step;
    process->progress.set_step(step);
    process->progress.set_phase("training");
    process->progress.set_train_loss(5.0 / static_cast<double>(step));
    process->progress.set_step_seconds(0.08);
    process->progress.set_tokens_per_second(1000);
    Report(*process);
  }
  // The ranks agree on the step after which they stop.
  const bool stop = !last && std::any_of(ranks.begin(), ranks.end(), [](const Process* process) {
    return process->terminating;
  });
  if (spec.has_checkpoint() && (last || stop || step % spec.checkpoint().every_steps() == 0)) {
    Save(gang, step);
  }
  if (stop) return StopAtBoundary(gang);
  last ? Finish(gang) : TryStep(gang);
}

void World::StopAtBoundary(const Members& gang) {
  Count("stopped at a step boundary");
  stopped_.insert(gang.attempt);
  for (Process* process : Gang(gang)) {
    process->stopped = true;
    const RankKey key = process->key;
    queue_.After(absl::Milliseconds(rng_.Below(300)),
                 [this, key, generation = process->generation] {
                   Process* p = Find(key, generation);
                   if (p == nullptr) return;
                   End(*p, v1::CAUSE_PREEMPTED, 3, 0, "asked to stop");
                 });
  }
}

void World::AskToStop(Process& process) {
  if (process.terminating) return;
  process.terminating = true;
  // Before it trains there is no step at whose end it could stop.
  if (!process.bootstrapped) End(process, v1::CAUSE_CANCELLED, 0, 0, "asked to stop");
}

void World::Finish(const Members& gang) {
  for (Process* process : Gang(gang)) {
    const RankKey key = process->key;
    queue_.After(absl::Milliseconds(rng_.Below(300)),
                 [this, key, generation = process->generation] {
                   Process* p = Find(key, generation);
                   if (p == nullptr) return;
                   ++finished_ranks_[key.attempt.job.value()];
                   End(*p, v1::CAUSE_COMPLETED, 0, 0, "");
                 });
  }
}

// Before the next step begins, shards and manifest are complete on disk and rank 0 has left its
// commit request in its run directory.
void World::Save(const Members& gang, int64_t step) {
  for (Process* process : Gang(gang)) {
    if (process->key.rank != 0) continue;
    v1::CheckpointRecord record;
    record.set_step(step);
    record.set_epoch(gang.attempt.second);
    record.set_membership(gang.membership);
    record.set_path(CheckpointPath(gang, step));
    record.set_bytes(100);
    saved_.insert({record.path(), step});
    process->commits.push_back(record);
    v1::CommitRequest commit;
    *commit.mutable_identity() = IdentityOf(*process);
    *commit.mutable_checkpoint() = record;
    CallDaemon(process->key, process->generation, commit);
  }
}

void World::Report(Process& process) {
  v1::ReportRequest report;
  *report.mutable_identity() = IdentityOf(process);
  *report.mutable_progress() = process.progress;
  CallDaemon(process.key, process.generation, report);
}

void World::CallDaemon(const RankKey& key, uint64_t generation, worker::RankRequest request) {
  Process* process = Find(key, generation);
  if (process == nullptr) return;
  Machine& machine = machines_[process->worker];
  if (machine.daemon == nullptr) {
    if (std::holds_alternative<v1::ReportRequest>(request)) return;  // the next report replaces it
    queue_.After(absl::Milliseconds(200), [this, key, generation, request = std::move(request)] {
      CallDaemon(key, generation, request);
    });
    return;
  }
  const uint64_t call = next_id_++;
  machine.calls[call] = {key, generation, request};
  Feed(machine, worker::RankCall{worker::CallId(call), std::move(request)});
}

void World::Answered(const RankKey& key, uint64_t generation, const worker::RankRequest& request,
                     const absl::StatusOr<worker::RankResponse>& response) {
  // What it asked before it started anew is nobody's any more.
  Process* process = Find(key, generation);
  if (process == nullptr) return;
  if (!response.ok()) {
    if (absl::IsAborted(response.status())) {
      return End(*process, v1::CAUSE_CANCELLED, 4, 0, "the daemon does not hold this attempt");
    }
    if (!std::holds_alternative<v1::ReportRequest>(request)) {
      queue_.After(absl::Milliseconds(200),
                   [this, key, generation, request] { CallDaemon(key, generation, request); });
    }
    return;
  }
  if (const auto* got = std::get_if<v1::GetResponse>(&*response)) {
    if (got->value() != AddressOf(GangOf(*process))) {
      Violate(absl::StrCat(ToString(key), " in membership ", MembershipOf(*process),
                           " got a bootstrap value ", got->value()));
    }
    process->bootstrapped = true;
    TryStep(GangOf(*process));
  } else if (const auto* report = std::get_if<v1::ReportResponse>(&*response)) {
    if (report->membership() > MembershipOf(*process)) return StartAnew(*process);
    if (report->stop()) AskToStop(*process);
  }
}

void World::End(Process& process, v1::Cause cause, int code, int signal,
                const std::string& message) {
  if (!process.alive) return;
  process.alive = false;
  process.generation = next_id_++;
  process.stray = signal == 9 && machines_[process.worker].up && rng_.Chance(0.1);
  process.exit.set_cause(cause);
  process.exit.set_code(code);
  process.exit.set_signal(signal);
  process.exit.set_message(message);
  const RankKey key = process.key;
  Trace(absl::StrCat(process.worker, " ", ToString(key), " ends: ", v1::Cause_Name(cause),
                     " at step ", process.step));
  Answer(machines_[process.worker], absl::Milliseconds(1 + rng_.Below(300)),
         worker::RankExited{key, process.pid, process.exit, process.progress, process.commits});
  // Its peers notice it in their next collective.
  const int64_t steps = process.assignment.spec().engine().training().steps();
  for (Process* peer : Gang(GangOf(process))) {
    if (!peer->alive || peer->step == steps || peer->stopped) continue;
    queue_.After(absl::Milliseconds(5 + rng_.Below(400)),
                 [this, peer_key = peer->key, generation = peer->generation, key] {
                   Process* p = Find(peer_key, generation);
                   if (p == nullptr) return;
                   End(*p, v1::CAUSE_COMMUNICATION, 3, 0,
                       absl::StrCat("lost rank ", key.rank, " in all-reduce"));
                 });
  }
}

void World::BreakLink(Process& process, Process& peer, v1::Cause cause) {
  const RankKey key = process.key, other = peer.key;
  const auto end = [this, cause](Process& at, const RankKey& lost) {
    at.exit.set_peer(lost.rank);
    End(at, cause, 3, 0, absl::StrCat("cannot reach rank ", lost.rank));
  };
  const bool both = rng_.Chance(0.5);
  end(process, other);
  if (!both) return;
  queue_.After(absl::Milliseconds(rng_.Below(400)),
               [this, end, key, other, generation = peer.generation] {
                 Process* p = Find(other, generation);
                 if (p != nullptr) end(*p, key);
               });
}

}  // namespace muster::sim
