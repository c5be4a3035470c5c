#include "coordinator/core/attempts.h"

#include <algorithm>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/commits.h"
#include "coordinator/core/device_accounts.h"
#include "coordinator/core/hang.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/planned_job.h"
#include "coordinator/core/schema.h"
#include "coordinator/scheduler/placement.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

DeadlineKey AttemptDeadline(const JobEntry& job) {
  return {DeadlineKey::Kind::kAttempt, job.fixed.id()};
}

// "worker-1 (host a, 10.0.0.1)".
std::string PlaceText(const v1::RankStatus& rank) {
  return absl::StrCat(rank.worker(), " (host ", rank.host(), rank.address().empty() ? "" : ", ",
                      rank.address(), ")");
}

std::string HowExited(const v1::RankExit& exit) {
  std::string how = exit.signal() != 0 ? absl::StrCat("was killed by signal ", exit.signal())
                                       : absl::StrCat("exited with code ", exit.code());
  absl::StrAppend(&how, " (", CauseText(exit.cause()), ")");
  if (!exit.message().empty()) absl::StrAppend(&how, ": ", exit.message());
  return how;
}

// True when the loss of `worker` is why the attempt ended: its peers noticed only that their
// connections broke. Two workers that lost each other while a third one was lost ended the attempt
// for a reason of their own.
bool ExplainedByLoss(const v1::StateRow& state, const std::string& worker) {
  if (IsSymptom(state.stop_cause())) return true;
  return state.stop_cause() == v1::CAUSE_NETWORK &&
         (state.between().empty() ||
          std::count(state.between().begin(), state.between().end(), worker) > 0);
}

}  // namespace

void Attempts::Transition(JobEntry& job, AttemptEvent event, const std::string& why, Turn& turn) {
  const v1::AttemptState from = job.state.attempt_state();
  const v1::AttemptState to = Next(from, event);
  CHECK(to != v1::ATTEMPT_STATE_UNSPECIFIED)
      << "job " << job.id() << " epoch " << job.epoch().value() << ": no transition from "
      << spec::EnumName(from) << " by event " << static_cast<int>(event);
  job.state.set_attempt_state(to);
  v1::Event row = About(job, v1::EVENT_KIND_ATTEMPT_STATE);
  row.set_from(spec::EnumName(from));
  row.set_to(spec::EnumName(to));
  if (to == v1::ATTEMPT_STATE_STOPPING) {
    row.set_cause(job.state.stop_cause());
    row.set_rank(job.state.stop_rank());
    *row.mutable_between() = job.state.between();
  }
  row.set_message(why);
  turn.Log(std::move(row));
  turn.Persist(job.id());
}

absl::Status Attempts::Recover(const JobEntry& job) {
  for (const v1::Placement& placement : job.attempt.placements()) {
    if (IsGone(job.gang.state(placement.rank())) && !job.up()) continue;
    if (workers_.Find(WorkerId(placement.worker())) == nullptr) {
      return absl::DataLossError(absl::StrCat("job ", job.fixed.id(), " is placed on worker ",
                                              placement.worker(), ", which has no row"));
    }
    workers_.Hold(placement, job.id(), job.epoch(), spec::ShareOf(job.spec()));
  }
  for (const v1::Placement& placement : job.attempt.leaving()) {
    if (workers_.Find(WorkerId(placement.worker())) == nullptr) {
      return absl::DataLossError(absl::StrCat("job ", job.fixed.id(), " leaves worker ",
                                              placement.worker(), ", which has no row"));
    }
    workers_.Hold(placement, job.id(), job.epoch(), spec::ShareOf(job.spec()));
  }
  scheduling_.RecoverRunning(job.id(), AsRunning(job, reservations_));
  return absl::OkStatus();
}

void Attempts::Resume(JobEntry& job, Turn& turn) {
  deadlines_.Set(AttemptDeadline(job), turn.now());
  clock_.Resume(job, turn);
}

void Attempts::Allocate(JobEntry& job, const std::vector<v1::Placement>& placements, Turn& turn) {
  v1::StateRow& state = job.state;
  state.set_epoch(std::max(state.epoch() + 1, state.epoch_floor()));
  state.set_attempts(state.attempts() + 1);
  state.clear_not_before();
  state.clear_after_release();
  state.clear_recovering_ranks();
  state.set_committed_step_at_attempt_start(state.last_committed_step());
  state.set_attempt_live(true);
  state.set_attempt_state(v1::ATTEMPT_STATE_ALLOCATED);
  state.clear_stop_cause();
  state.clear_stop_message();
  state.clear_between();
  state.set_stop_rank(-1);
  job.KeepPast(turn.batch());
  v1::AttemptRow& attempt = job.attempt;
  state.clear_launched_membership();
  attempt.Clear();
  attempt.set_epoch(state.epoch());
  attempt.set_history_id(identity_.history_id);
  attempt.set_membership(1);
  *attempt.mutable_started() = ToProto(turn.now());
  for (v1::CheckpointRecord& checkpoint : job.checkpoints.Restorable()) {
    *attempt.add_restore() = std::move(checkpoint);
  }
  attempt.mutable_placements()->Add(placements.begin(), placements.end());
  membership_.SetAddresses(attempt);
  std::set<std::string> workers;
  for (const v1::Placement& placement : attempt.placements()) {
    workers_.Hold(placement, job.id(), job.epoch(), spec::ShareOf(job.spec()));
    workers.insert(placement.worker());
    turn.DesiredChanged(WorkerId(placement.worker()));
  }
  WaitingJob waiting = AsWaiting(job, reservations_);
  if (job.elastic()) waiting = AtSize(waiting, static_cast<int32_t>(placements.size()));
  *attempt.mutable_cost() = CostOf(workers_.slots(), waiting, placements);
  state.clear_queued();
  state.clear_expected_end();
  if (waiting.runtime != absl::InfiniteDuration()) {
    *state.mutable_expected_end() = ToProto(turn.now() + waiting.runtime);
  }
  scheduling_.AddRunning(job.id(), AsRunning(job, reservations_), turn.now());
  job.gang = Gang(attempt, turn.now());
  job.PutAttempt(turn.batch());
  job.symptom_at.reset();
  job.evaluated_step = 0;
  job.attempt_since = job.progress_at = turn.now();
  const std::string why =
      absl::StrCat(placements.size(), " rank(s) on ", absl::StrJoin(workers, ", "));
  v1::Event row = About(job, v1::EVENT_KIND_ATTEMPT_STATE);
  row.set_to(spec::EnumName(state.attempt_state()));
  row.set_message(why);
  turn.Log(std::move(row));
  turn.Act(Measured{Measured::What::kQueueWait, absl::ToDoubleSeconds(turn.now() - job.queued_at)});
  states_.Transition(job, JobEvent::kPlaced, why, turn);
  deadlines_.Set(AttemptDeadline(job), turn.now() + kPrepareTimeout);
  const auto older = std::find_if(workers.begin(), workers.end(), [this](const std::string& name) {
    return !workers_.Find(WorkerId(name))->runs_commands;
  });
  if (job.runs_command() && older != workers.end()) {
    Stop(job,
         {v1::CAUSE_LAUNCH, absl::StrCat("the daemon of worker ", *older, " is of version ",
                                         workers_.Find(WorkerId(*older))->row.version(),
                                         ", which cannot run commands; upgrade it")},
         turn);
  }
}

void Attempts::ApplyRank(JobEntry& job, const std::string& worker, const v1::ObservedRank& observed,
                         Turn& turn) {
  const int rank = observed.rank();
  if (!job.gang.Has(rank) || job.gang.rank(rank).worker() != worker) return;
  // Of a command, its own process and never the one that waits for it, which a daemon that has
  // just adopted the rank knows before it hears from it.
  const int64_t pid = job.runs_command() ? observed.progress().command_pid() : observed.pid();
  if (pid != 0) job.gang.SetPid(rank, pid);
  if (observed.has_progress()) ApplyProgress(job, rank, observed.progress(), turn);
  if (observed.state() > v1::RANK_STATE_RELEASED || !v1::RankState_IsValid(observed.state())) {
    return;
  }
  const v1::RankState before = job.gang.state(rank);
  if (HasEnded(observed.state()) && observed.has_exit()) {
    v1::RankExit exit = observed.exit();
    exit.set_message(Bounded(exit.message()));
    if (job.gang.AddExit(rank, std::move(exit)) && !HasEnded(before)) {
      v1::Event row = About(job, v1::EVENT_KIND_RANK_EXITED);
      row.set_rank(rank);
      row.set_worker(worker);
      row.set_cause(observed.exit().cause());
      row.set_message(
          absl::StrCat("rank ", rank, " on ", worker, " ", HowExited(job.gang.exit(rank))));
      turn.Log(std::move(row));
    }
  }
  // States of a rank only grow within a membership, so a report that comes late changes nothing.
  if (observed.state() <= before) return;
  job.gang.SetState(rank, observed.state());
  if (HasEnded(observed.state())) {
    turn.Persist(job.id());
  } else {
    turn.Progressed(job.id());
  }
}

void Attempts::ApplyProgress(JobEntry& job, int rank, const v1::RankProgress& progress,
                             Turn& turn) {
  const Gang::Report report = job.gang.Take(rank, progress, turn.now(), job.progress_view());
  if (report == Gang::Report::kOlder) return;
  if (job.gang.advanced_at() == turn.now()) job.progress_at = turn.now();
  if (report == Gang::Report::kChanged) {
    job.progress_changed = true;
    turn.Progressed(job.id());
    if (job.state.state() == v1::JOB_STATE_RUNNING) clock_.ExpectEnd(job, turn);
  }
  // Reports that only say that nothing has changed may tell that the gang hangs.
  if (report == Gang::Report::kSame && job.up() && job.account.use() != UseOf(job, turn.now())) {
    turn.Progressed(job.id());
  }
  if (progress.validation_step() > 0) {
    Commits::Evaluated(job, progress.validation_step(), progress.validation_loss(), turn);
  }
  if (job.up() && job.gang.slow_ranks().Due(turn.now())) faults_.NoteSlowRanks(job, turn);
}

void Attempts::Advance(JobEntry& job, const std::string& worker, Turn& turn) {
  if (!job.has_attempt()) return;
  if (job.up()) CheckExits(job, turn);
  switch (job.state.attempt_state()) {
    case v1::ATTEMPT_STATE_ALLOCATED:
      if (!job.gang.AllAtLeast(v1::RANK_STATE_PREPARED)) break;
      Transition(job, AttemptEvent::kAllPrepared, "every daemon has accepted it", turn);
      Transition(job, AttemptEvent::kStart, "ranks start", turn);
      job.state.set_launched_membership(job.membership());
      states_.Transition(job, JobEvent::kLaunched, "ranks start", turn);
      turn.Act(Measured{Measured::What::kPlacement,
                        absl::ToDoubleSeconds(turn.now() - job.attempt_since)});
      job.attempt_since = job.progress_at = turn.now();
      clock_.Start(job, turn);
      CheckTimeLimit(job, turn);
      TellWorkers(job, turn);
      CheckDeadlines(job, turn);
      break;
    case v1::ATTEMPT_STATE_BOOTSTRAPPING:
      if (!job.gang.AllAtLeast(v1::RANK_STATE_TRAINING)) break;
      if (!job.state.has_started()) *job.state.mutable_started() = ToProto(turn.now());
      Transition(job, AttemptEvent::kAllTraining,
                 job.runs_command() ? "the command runs on every rank"
                                    : "every rank has joined its communicators",
                 turn);
      states_.Transition(job, JobEvent::kTraining, job.runs_command() ? "running" : "training",
                         turn);
      if (job.failed_at.has_value()) {
        turn.Act(
            Measured{Measured::What::kRecover, absl::ToDoubleSeconds(turn.now() - *job.failed_at)});
        job.failed_at.reset();
      }
      job.progress_at = turn.now();
      CheckExits(job, turn);  // all ranks of a short job may have finished by now
      break;
    case v1::ATTEMPT_STATE_STOPPING:
      turn.FreeSlots(job.id(), worker);
      break;
    default:
      break;
  }
}

void Attempts::CheckExits(JobEntry& job, Turn& turn) {
  // The culprit is the lowest rank that ended for a cause of its own. Without one it is the lowest
  // rank whose collective failed, which only tells that another rank vanished.
  int32_t culprit = -1;
  bool symptoms_only = true;
  for (const int32_t rank : job.gang.failed()) {
    const bool symptom = IsSymptom(job.gang.exit(rank).cause());
    if (culprit < 0 || (symptoms_only && !symptom)) culprit = rank;
    symptoms_only = symptoms_only && symptom;
    if (!symptoms_only) break;
  }
  if (culprit >= 0) {
    if (symptoms_only) {
      if (!job.symptom_at.has_value()) {
        job.symptom_at = turn.now();
        deadlines_.Set(AttemptDeadline(job), turn.now() + kCulpritGrace);
      }
      if (turn.now() < *job.symptom_at + kCulpritGrace) return;
    }
    const v1::RankExit& exit = job.gang.exit(culprit);
    Stop(
        job,
        {exit.cause() == v1::CAUSE_UNSPECIFIED ? v1::CAUSE_UNKNOWN : exit.cause(),
         absl::StrCat("rank ", culprit, " on ", job.gang.rank(culprit).worker(), " ",
                      HowExited(exit), "; see `muster logs ", job.name(), " --rank ", culprit, "`"),
         culprit, exit.has_peer() ? exit.peer() : -1},
        turn);
    return;
  }
  if (job.state.attempt_state() == v1::ATTEMPT_STATE_TRAINING &&
      job.gang.completed() == job.gang.size()) {
    Stop(job, {v1::CAUSE_COMPLETED, "every rank has finished"}, turn);
  }
}

bool Attempts::AnyWorkerAway(const JobEntry& job) const {
  for (const auto& [name, ranks] : job.gang.by_worker()) {
    const WorkerEntry* worker = workers_.Find(WorkerId(name));
    if (worker == nullptr || !worker->session.has_value() ||
        worker->row.state() != v1::WORKER_STATE_READY) {
      return true;
    }
  }
  return false;
}

void Attempts::CheckDeadlines(JobEntry& job, Turn& turn) {
  if (!job.up()) {
    deadlines_.Clear(AttemptDeadline(job));
    return;
  }
  if (job.symptom_at.has_value()) {
    CheckExits(job, turn);
    if (!job.up()) return;
  }
  const bool allocated = job.state.attempt_state() == v1::ATTEMPT_STATE_ALLOCATED;
  const absl::Duration limit = allocated ? kPrepareTimeout : config_.progress_timeout;
  absl::Time due = (allocated ? job.attempt_since : job.progress_at) + limit;
  const bool silent_command = job.runs_command() &&
                              job.state.attempt_state() == v1::ATTEMPT_STATE_TRAINING &&
                              !job.gang.command_reports();
  if (turn.now() >= due && (silent_command || AnyWorkerAway(job))) {
    // A worker that is away may have prepared its ranks, or they may make progress; it tells when
    // it is back. When it is given up, so is the attempt. A command that has never reported
    // progress may make some.
    (allocated ? job.attempt_since : job.progress_at) = turn.now();
    due = turn.now() + limit;
  }
  if (turn.now() < due) {
    if (job.symptom_at.has_value()) due = std::min(due, *job.symptom_at + kCulpritGrace);
    deadlines_.Set(AttemptDeadline(job), due);
    return;
  }
  turn.Act(Measured{Measured::What::kDetectFailure, absl::ToDoubleSeconds(limit)});
  const auto& ranks = job.gang.ranks();
  if (allocated) {
    const auto waited = std::find_if(ranks.begin(), ranks.end(), [](const auto& rank) {
      return rank.state() < v1::RANK_STATE_PREPARED;
    });
    const std::string worker = waited->worker();  // a replacement makes a new gang
    ReplaceOrStop(job, worker,
                  {v1::CAUSE_LAUNCH,
                   absl::StrCat("rank ", waited->rank(), " on ", worker,
                                " was not prepared within ", absl::FormatDuration(limit)),
                   waited->rank(), -1, false, false, worker},
                  Departure::kToBeProven, turn);
    return;
  }
  const HangVerdict verdict =
      NameCulprit(job.gang.reports(), job.gang.answered(), job.gang.ranks(), turn.now());
  std::string why =
      job.state.attempt_state() == v1::ATTEMPT_STATE_TRAINING
          ? absl::StrCat("no rank has finished a step for ", absl::FormatDuration(limit))
          : absl::StrCat("training had not begun: nothing new from any rank for ",
                         absl::FormatDuration(limit));
  if (verdict.rank >= 0) {
    const v1::RankStatus& rank = ranks[verdict.rank];
    const std::string phase =
        Bounded(job.gang.reports()[static_cast<size_t>(verdict.rank)].phase());
    absl::StrAppend(&why, "; rank ", verdict.rank, " on ", rank.worker(),
                    phase.empty() ? "" : absl::StrCat(" (", phase, ")"),
                    " is at fault: ", verdict.text);
  } else if (!verdict.text.empty()) {
    absl::StrAppend(&why, "; ", verdict.text);
  } else {
    const std::string phase = Bounded(job.phase);
    absl::StrAppend(&why, "; no rank is behind the others",
                    phase.empty() ? "" : absl::StrCat(", rank 0 is ", phase));
  }
  Stop(job, {v1::CAUSE_HANG, why, verdict.rank}, turn);
}

void Attempts::CheckTimeLimit(JobEntry& job, Turn& turn) {
  if (const auto over = clock_.CheckLimit(job, turn); over.has_value()) Stop(job, *over, turn);
}

void Attempts::Stop(JobEntry& job, const StopReason& reason, Turn& turn) {
  // Only a user cancels a job. A rank that was ended as a coordinator had asked, in a history that
  // a restored backup does not have, is no reason to.
  if (reason.cause == v1::CAUSE_CANCELLED && reason.rank >= 0 && job.state.epoch_floor() > 0) {
    StopReason forgotten = reason;
    forgotten.cause = v1::CAUSE_COORDINATOR;
    return Stop(job, forgotten, turn);
  }
  v1::StateRow& state = job.state;
  const bool trained = PropertiesOf(state.attempt_state()).trained;
  state.set_stop_cause(reason.cause);
  std::string message = reason.message;
  state.clear_between();
  if ((reason.cause == v1::CAUSE_LAUNCH || reason.cause == v1::CAUSE_NETWORK) && reason.rank >= 0 &&
      reason.peer >= 0 && reason.peer < job.gang.size()) {
    const v1::RankStatus& one = job.gang.rank(reason.rank);
    const v1::RankStatus& other = job.gang.rank(reason.peer);
    for (const std::string& worker : std::set<std::string>{one.worker(), other.worker()}) {
      state.add_between(worker);
    }
    message = absl::StrCat("between ", PlaceText(one), " and ", PlaceText(other), ": ", message);
  }
  state.set_stop_message(Bounded(message));
  state.set_stop_rank(reason.rank);
  faults_.NoteEnd(job, reason, turn);
  scheduling_.ChangeRunning(job.id(), [](RunningJob& running) { running.stopping = true; });
  clock_.Stop(job, turn);
  Transition(job, AttemptEvent::kStop, state.stop_message(), turn);
  values_.Drop(job.id(), job.epoch(),
               absl::AbortedError(
                   absl::StrCat("job ", job.fixed.id(), ": epoch ", state.epoch(), " has ended")),
               turn);
  deadlines_.Clear(AttemptDeadline(job));
  job.symptom_at.reset();
  TellWorkers(job, turn);
  if (reason.yields) {
    job.state.set_after_release(v1::JOB_STATE_QUEUED);
    states_.Transition(job, reason.resizes ? JobEvent::kResize : JobEvent::kPreempt,
                       state.stop_message(), turn);
    job.waiting.Clear();
    job.waiting.set_code(v1::WAIT_CODE_RELEASING);
    return FreeAllSlots(job, turn);
  }
  switch (reason.cause) {
    case v1::CAUSE_COMPLETED:
      job.state.set_after_release(v1::JOB_STATE_SUCCEEDED);
      break;
    case v1::CAUSE_CANCELLED:
      job.state.set_after_release(v1::JOB_STATE_CANCELLED);
      states_.Transition(job, JobEvent::kCancel, state.stop_message(), turn);
      break;
    default:
      job.state.set_after_release(BudgetOf(reason.cause, trained) == Budget::kNotRetried
                                      ? v1::JOB_STATE_FAILED
                                      : v1::JOB_STATE_QUEUED);
      job.failed_at = turn.now();
      states_.Transition(job, JobEvent::kAttemptFailed, state.stop_message(), turn);
      job.waiting.Clear();
      job.waiting.set_code(v1::WAIT_CODE_RELEASING);
  }
  FreeAllSlots(job, turn);
}

void Attempts::TellWorkers(const JobEntry& job, Turn& turn) {
  for (const auto& [worker, ranks] : job.gang.by_worker()) turn.DesiredChanged(WorkerId(worker));
}

void Attempts::FreeAllSlots(const JobEntry& job, Turn& turn) {
  for (const auto& [worker, ranks] : job.gang.by_worker()) turn.FreeSlots(job.id(), worker);
}

std::set<JobId> Attempts::FreeReleased(Turn& turn) {
  std::set<JobId> ended;
  for (const auto& [id, worker] : turn.TakeReleased()) {
    JobEntry& job = *jobs_.Find(id);
    if (!job.has_attempt() || job.up()) continue;
    for (const int32_t rank : job.gang.On(worker)) {
      const v1::Placement& placement = job.attempt.placements(rank);
      if (!IsGone(job.gang.state(rank)) || !workers_.Holds(placement, id, job.epoch())) continue;
      workers_.Free(placement, id, job.epoch());
      turn.Persist(id);
      turn.DesiredChanged(WorkerId(worker));
      turn.Reschedule();
    }
    if (job.gang.AllAtLeast(v1::RANK_STATE_RELEASED) && job.attempt.leaving().empty()) {
      ended.insert(id);
    }
  }
  return ended;
}

v1::AttemptEnd Attempts::EndOf(const JobEntry& job, const Turn& turn) {
  const v1::StateRow& state = job.state;
  v1::AttemptEnd end;
  end.set_epoch(state.epoch());
  end.set_cause(state.stop_cause());
  end.set_message(state.stop_message());
  end.set_rank(state.stop_rank());
  // Commits are durable at once and progress is not, so that after a restart of the coordinator the
  // committed step may be the larger one.
  end.set_step(std::max(job.progress.step(), state.last_committed_step()));
  *end.mutable_started() = job.attempt.started();
  *end.mutable_ended() = ToProto(turn.now());
  // Decided at the release: until then a checkpoint that was written completely may be committed,
  // and an attempt that advanced the committed step does not count.
  const bool advanced =
      job.state.last_committed_step() > job.state.committed_step_at_attempt_start();
  *end.mutable_between() = state.between();
  // Two workers that lose each other once do not count. When the same two do so twice in a row, the
  // network has to be repaired, and the job must not retry for ever.
  const bool again = !end.between().empty() && !job.ends.empty() &&
                     std::equal(end.between().begin(), end.between().end(),
                                job.ends.back().between().begin(), job.ends.back().between().end());
  end.set_counted((BudgetOf(end.cause(), /*trained=*/true) == Budget::kCounted || again) &&
                  !advanced && job.state.after_release() != v1::JOB_STATE_FAILED);
  return end;
}

Attempts::Released Attempts::Release(JobEntry& job, Turn& turn) {
  Transition(job, AttemptEvent::kAllReleased, "its devices are accounted for", turn);
  v1::AttemptEnd end = EndOf(job, turn);
  job.phase.clear();
  job.AddEnd(end, turn.batch());
  job.state.set_furthest_step(std::max(job.state.furthest_step(), end.step()));
  v1::Event row = About(job, v1::EVENT_KIND_ATTEMPT_ENDED);
  row.set_cause(end.cause());
  row.set_rank(end.rank());
  row.set_message(end.message());
  *row.mutable_between() = end.between();
  turn.Log(std::move(row));
  const v1::JobState after = job.state.after_release();
  job.state.set_attempt_live(false);
  scheduling_.RemoveRunning(job.id(), turn.now());
  job.state.clear_after_release();
  job.attempt.clear_restore();
  job.attempt.mutable_ranks()->Add(job.gang.ranks().begin(), job.gang.ranks().end());
  job.PutAttempt(turn.batch());
  turn.Persist(job.id());
  turn.Reschedule();
  return {std::move(end), after};
}

// ---- ranks that are replaced, lost or not held --------------------------------------------------

bool Attempts::Replace(JobEntry& job, const std::string& worker, const StopReason& reason,
                       Departure departure, Turn& turn) {
  const std::optional<std::string> what = membership_.Replace(job, worker, reason, departure, turn);
  if (!what.has_value()) return false;
  job.symptom_at.reset();
  job.phase.clear();
  job.attempt_since = job.progress_at = turn.now();
  if (job.state.attempt_state() == v1::ATTEMPT_STATE_BOOTSTRAPPING) {
    // A row of a version that knew no memberships does not say that its ranks were told to start.
    job.state.set_launched_membership(job.membership() - 1);
    clock_.Stop(job, turn);
    Transition(job, AttemptEvent::kReplace, *what, turn);
    states_.Transition(job, JobEvent::kReplaced, *what, turn);
  }
  CheckDeadlines(job, turn);
  TellWorkers(job, turn);
  turn.DesiredChanged(WorkerId(worker));
  turn.Reschedule();
  StopReason of_worker = reason;
  of_worker.worker = worker;
  faults_.NoteEnd(job, of_worker, turn);
  return true;
}

void Attempts::ReplaceOrStop(JobEntry& job, const std::string& worker, const StopReason& reason,
                             Departure departure, Turn& turn) {
  if (!Replace(job, worker, reason, departure, turn)) Stop(job, reason, turn);
}

bool Attempts::IsOfMembership(JobEntry& job, const std::string& worker,
                              const v1::ObservedAttempt& observed, Turn& turn) {
  if (job.Leaves(worker)) {
    for (const v1::ObservedRank& rank : observed.ranks()) {
      const auto& leaving = job.attempt.leaving();
      const bool known =
          std::any_of(leaving.begin(), leaving.end(), [&](const v1::Placement& placement) {
            return placement.worker() == worker && placement.rank() == rank.rank();
          });
      if (known && rank.state() == v1::RANK_STATE_RELEASED) {
        membership_.Departed(job, worker, rank.rank(), turn);
      }
    }
    return false;
  }
  const uint32_t membership = std::max<uint32_t>(1, observed.membership());
  if (membership == job.membership() || !job.up()) return true;
  if (const WorkerEntry& entry = *workers_.Find(WorkerId(worker)); !entry.knows_memberships) {
    Stop(job,
         {v1::CAUSE_LAUNCH,
          absl::StrCat("the daemon of worker ", worker, " was replaced by one of version ",
                       entry.row.version(), ", which knows no memberships; upgrade it")},
         turn);
    return false;
  }
  if (membership > job.membership()) {
    // A membership is durable before any daemon is told of it.
    Stop(job,
         {v1::CAUSE_COORDINATOR,
          absl::StrCat("worker ", worker, " holds membership ", membership, ", this coordinator ",
                       "knows of ", job.membership(), ": its state was restored from a backup")},
         turn);
  }
  return false;
}

void Attempts::GiveUp(WorkerEntry& worker, JobEntry& job, const std::string& reason, Turn& turn) {
  if (job.Leaves(worker.row.name())) return membership_.Departed(job, worker.row.name(), -1, turn);
  std::vector<int32_t> ranks;
  for (const int32_t rank : job.gang.On(worker.row.name())) {
    if (workers_.Holds(job.attempt.placements(rank), job.id(), job.epoch())) ranks.push_back(rank);
  }
  const std::string why = absl::StrCat("rank ", ranks.front(), " is lost: ", reason);
  v1::Event row = About(job, v1::EVENT_KIND_RANKS_GIVEN_UP);
  row.set_worker(worker.row.name());
  row.set_rank(ranks.front());
  row.set_message(absl::StrCat("nothing is known of ", ranks.size(), " rank(s) on worker ",
                               worker.row.name(), ", from rank ", ranks.front(),
                               "; the job waits for them no longer"));
  turn.Log(std::move(row));
  turn.Persist(job.id());
  const StopReason lost = {v1::CAUSE_WORKER_LOST, why, ranks.front()};
  if (job.up() && Replace(job, worker.row.name(), lost, Departure::kProven, turn)) return;
  for (const int32_t rank : ranks) job.gang.SetState(rank, v1::RANK_STATE_LOST);
  if (job.up()) return Stop(job, lost, turn);
  if (ExplainedByLoss(job.state, worker.row.name())) {
    job.state.set_stop_message(absl::StrCat(why, "; before: ", job.state.stop_message()));
    job.state.set_stop_cause(v1::CAUSE_WORKER_LOST);
    job.state.set_stop_rank(ranks.front());
    job.state.clear_between();
  }
  turn.FreeSlots(job.id(), worker.row.name());
}

// The daemon does not hold this attempt. That proves that its ranks are gone only if the daemon had
// been told of the attempt before.
void Attempts::ApplyAbsent(WorkerEntry& worker, JobEntry& job, uint64_t applied, bool hello,
                           Turn& turn) {
  const std::string& name = worker.row.name();
  const bool leaves = job.Leaves(name);
  const bool stopping = leaves || !job.up();
  // A Hello lists everything, and nothing older can follow it: the daemon can get an attempt that
  // it does not hold now only from a Desired of this session.
  const bool proven = hello ? stopping || Membership::MayHaveStarted(job, name)
                            : worker.desired.Knew(job.id(), job.epoch(), stopping, applied);
  if (!proven) {
    if (!hello) return;
    // Its ranks have not started; the daemon will be asked to prepare them again.
    for (const int32_t rank : job.gang.On(name)) job.gang.SetState(rank, v1::RANK_STATE_ASSIGNED);
    return;
  }
  if (leaves) return membership_.Departed(job, name, -1, turn);
  const std::vector<int32_t> ranks = job.gang.On(name);
  const StopReason gone = {
      v1::CAUSE_WORKER_LOST,
      absl::StrCat("worker ", name, " does not hold rank ", ranks.front(),
                   " any more: its host was restarted or its state directory was removed"),
      ranks.front()};
  if (!stopping && Replace(job, name, gone, Departure::kProven, turn)) return;
  for (const int32_t rank : ranks) {
    job.gang.SetState(rank, std::max(job.gang.state(rank), v1::RANK_STATE_RELEASED));
  }
  turn.Persist(job.id());
  if (!stopping) return Stop(job, gone, turn);
  turn.FreeSlots(job.id(), name);
}

absl::Status Attempts::CheckCurrent(const WorkerEntry& worker, const std::string& job_id,
                                    uint64_t epoch, uint32_t membership) const {
  const JobEntry* job = jobs_.Find(JobId(job_id));
  if (job == nullptr || !job->up() || job->epoch().value() != epoch ||
      worker.foreign_attempts.contains({job->id(), job->epoch()})) {
    return absl::AbortedError(
        absl::StrCat("job ", Bounded(job_id), ": epoch ", epoch, " has ended"));
  }
  if (job->gang.On(worker.row.name()).empty()) {
    return absl::PermissionDeniedError(absl::StrCat("job ", job_id, " epoch ", epoch,
                                                    " has no rank on worker ", worker.row.name()));
  }
  membership = std::max<uint32_t>(1, membership);
  if (membership != job->membership()) {
    return absl::UnavailableError(absl::StrCat("job ", job_id, " epoch ", epoch, ": membership ",
                                               membership, " was replaced by ", job->membership()));
  }
  return absl::OkStatus();
}

}  // namespace muster::coordinator
