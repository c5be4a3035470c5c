#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/network.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/hang.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/progress.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

DeadlineKey AttemptDeadline(const JobEntry& job) {
  return {DeadlineKey::Kind::kAttempt, job.job().id()};
}

// True when ranks on these workers may talk over loopback: all workers are on the coordinator's
// machine.
bool ShareLoopback(const std::vector<const WorkerEntry*>& workers) {
  return std::all_of(workers.begin(), workers.end(), [&workers](const WorkerEntry* worker) {
    const v1::Worker& row = worker->row;
    return (row.address().empty() || IsLoopbackAddress(row.address())) &&
           row.boot_id() == workers.front()->row.boot_id();
  });
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

}  // namespace

bool HasRank(const v1::Attempt& attempt, const std::string& worker) {
  return std::any_of(
      attempt.placements().begin(), attempt.placements().end(),
      [&worker](const v1::Placement& placement) { return placement.worker() == worker; });
}

void CoreImpl::Transition(JobEntry& job, AttemptEvent event, const std::string& why, Turn& turn) {
  v1::Attempt& attempt = *job.record.mutable_attempt();
  const v1::AttemptState from = attempt.state();
  const v1::AttemptState to = Next(from, event);
  CHECK(to != v1::ATTEMPT_STATE_UNSPECIFIED)
      << "job " << job.id() << " epoch " << attempt.epoch() << ": no transition from "
      << spec::EnumName(from) << " by event " << static_cast<int>(event);
  attempt.set_state(to);
  job.job().set_attempt_state(to);
  v1::Event row = About(job, v1::EVENT_KIND_ATTEMPT_STATE);
  row.set_from(spec::EnumName(from));
  row.set_to(spec::EnumName(to));
  if (to == v1::ATTEMPT_STATE_STOPPING) {
    row.set_cause(attempt.stop_cause());
    row.set_rank(attempt.stop_rank());
    *row.mutable_between() = attempt.between();
  }
  row.set_message(why);
  turn.Log(std::move(row));
  turn.Persist(job.id());
}

void CoreImpl::Allocate(JobEntry& job, const std::vector<v1::Placement>& placements, Turn& turn) {
  v1::JobRecord& record = job.record;
  v1::Job& proto = job.job();
  proto.set_epoch(std::max(proto.epoch() + 1, record.epoch_floor()));
  proto.set_attempts(proto.attempts() + 1);
  record.clear_not_before();
  record.clear_after_release();
  record.set_committed_step_at_attempt_start(proto.last_committed_step());
  v1::Attempt& attempt = *record.mutable_attempt();
  attempt.Clear();
  attempt.set_epoch(proto.epoch());
  attempt.set_state(v1::ATTEMPT_STATE_ALLOCATED);
  attempt.set_stop_rank(-1);
  *attempt.mutable_started() = ToProto(turn.now());
  for (v1::CheckpointRecord& checkpoint : RestoreCandidates(proto)) {
    *attempt.add_restore() = std::move(checkpoint);
  }
  proto.set_attempt_state(attempt.state());
  proto.clear_ranks();
  std::vector<const WorkerEntry*> entries;
  for (const v1::Placement& placement : placements) {
    entries.push_back(workers_.Find(WorkerId(placement.worker())));
    CHECK(entries.back() != nullptr) << placement.worker();
  }
  const bool loopback = ShareLoopback(entries);
  std::set<std::string> workers;
  for (size_t i = 0; i < placements.size(); ++i) {
    v1::Placement& placement = *attempt.add_placements();
    placement = placements[i];
    const v1::Worker& row = entries[i]->row;
    // Other hosts cannot reach a loopback address. Where a worker has no other address, the
    // preflight of its ranks fails and says so.
    const bool outside = !loopback && (row.address().empty() || IsLoopbackAddress(row.address()));
    placement.set_address(outside && !row.outside_address().empty() ? row.outside_address()
                                                                    : row.address());
    v1::RankStatus& rank = *proto.add_ranks();
    rank.set_rank(placement.rank());
    rank.set_worker(placement.worker());
    rank.set_device(placement.device());
    rank.set_host(row.host());
    rank.set_address(placement.address());
    rank.set_state(v1::RANK_STATE_ASSIGNED);
    workers_.Hold(placement, job.id(), job.epoch());
    workers.insert(placement.worker());
    turn.DesiredChanged(WorkerId(placement.worker()));
  }
  job.progress.assign(placements.size(), {});
  job.answered.assign(placements.size(), turn.now());
  job.exits.clear();
  job.symptom_at.reset();
  job.evaluated_step = 0;
  job.attempt_since = job.progress_at = job.advanced_at = turn.now();
  const std::string why =
      absl::StrCat(placements.size(), " rank(s) on ", absl::StrJoin(workers, ", "));
  v1::Event row = About(job, v1::EVENT_KIND_ATTEMPT_STATE);
  row.set_to(spec::EnumName(attempt.state()));
  row.set_message(why);
  turn.Log(std::move(row));
  turn.Act(Measured{Measured::What::kQueueWait, absl::ToDoubleSeconds(turn.now() - job.queued_at)});
  Transition(job, JobEvent::kPlaced, why, turn);
  deadlines_.Set(AttemptDeadline(job), turn.now() + kPrepareTimeout);
}

void CoreImpl::ApplyRank(JobEntry& job, const std::string& worker, const v1::ObservedRank& observed,
                         Turn& turn) {
  const int rank = observed.rank();
  if (rank < 0 || rank >= job.job().ranks_size() || job.job().ranks(rank).worker() != worker) {
    return;
  }
  v1::RankStatus& status = *job.job().mutable_ranks(rank);
  if (observed.pid() != 0) status.set_pid(observed.pid());
  if (observed.has_progress()) ApplyProgress(job, rank, observed.progress(), turn);
  if (observed.state() > v1::RANK_STATE_RELEASED || !v1::RankState_IsValid(observed.state())) {
    return;
  }
  if (observed.state() >= v1::RANK_STATE_EXITED && observed.has_exit()) {
    v1::RankExit exit = observed.exit();
    exit.set_message(Bounded(exit.message()));
    const auto [entry, first] = job.exits.emplace(rank, std::move(exit));
    if (first && status.state() < v1::RANK_STATE_EXITED) {
      v1::Event row = About(job, v1::EVENT_KIND_RANK_EXITED);
      row.set_rank(rank);
      row.set_worker(worker);
      row.set_cause(observed.exit().cause());
      row.set_message(absl::StrCat("rank ", rank, " on ", worker, " ", HowExited(entry->second)));
      turn.Log(std::move(row));
    }
  }
  // States of a rank only grow within an epoch, so a report that comes late changes nothing.
  if (observed.state() <= status.state()) return;
  status.set_state(observed.state());
  if (observed.state() >= v1::RANK_STATE_EXITED) {
    turn.Persist(job.id());
  } else {
    turn.Progressed(job.id());
  }
}

void CoreImpl::ApplyProgress(JobEntry& job, int rank, const v1::RankProgress& progress,
                             Turn& turn) {
  v1::RankProgress& known = job.progress[static_cast<size_t>(rank)];
  if (progress.step() < known.step()) return;  // an older report that came late
  if (progress.step() > known.step() || progress.phase() != known.phase()) {
    job.progress_at = job.advanced_at = turn.now();
    job.answered[static_cast<size_t>(rank)] = turn.now();
  } else if (progress.answers() != known.answers()) {
    job.answered[static_cast<size_t>(rank)] = turn.now();
  }
  known = progress;
  v1::RankStatus& status = *job.job().mutable_ranks(rank);
  status.set_step(progress.step());
  status.set_metrics_address(Bounded(progress.metrics_address()));
  if (progress.has_times()) *status.mutable_times() = progress.times();
  if (progress.has_memory()) *status.mutable_memory() = progress.memory();
  if (FoldProgress(job.progress, job.job())) turn.Progressed(job.id());
  if (progress.validation_step() > 0) {
    Evaluated(job, progress.validation_step(), progress.validation_loss(), turn);
  }
}

void CoreImpl::Advance(JobEntry& job, Turn& turn) {
  if (!job.record.has_attempt()) return;
  const auto all = [&job](v1::RankState least) {
    return std::all_of(job.job().ranks().begin(), job.job().ranks().end(),
                       [least](const v1::RankStatus& rank) { return rank.state() >= least; });
  };
  if (IsUp(job.record.attempt().state())) CheckExits(job, turn);
  if (!job.record.has_attempt()) return;
  switch (job.record.attempt().state()) {
    case v1::ATTEMPT_STATE_ALLOCATED:
      if (!all(v1::RANK_STATE_PREPARED)) break;
      Transition(job, AttemptEvent::kAllPrepared, "every daemon has accepted it", turn);
      Transition(job, AttemptEvent::kStart, "ranks start", turn);
      Transition(job, JobEvent::kLaunched, "ranks start", turn);
      turn.Act(Measured{Measured::What::kPlacement,
                        absl::ToDoubleSeconds(turn.now() - job.attempt_since)});
      job.attempt_since = job.progress_at = turn.now();
      for (const v1::Placement& placement : job.record.attempt().placements()) {
        turn.DesiredChanged(WorkerId(placement.worker()));
      }
      CheckDeadlines(job, turn);
      break;
    case v1::ATTEMPT_STATE_BOOTSTRAPPING:
      if (!all(v1::RANK_STATE_TRAINING)) break;
      if (!job.job().has_started()) *job.job().mutable_started() = ToProto(turn.now());
      Transition(job, AttemptEvent::kAllTraining, "every rank has joined its communicators", turn);
      Transition(job, JobEvent::kTraining, "training", turn);
      if (job.failed_at.has_value()) {
        turn.Act(
            Measured{Measured::What::kRecover, absl::ToDoubleSeconds(turn.now() - *job.failed_at)});
        job.failed_at.reset();
      }
      job.progress_at = turn.now();
      CheckExits(job, turn);  // all ranks of a short job may have finished by now
      break;
    case v1::ATTEMPT_STATE_STOPPING:
      FreeReleased(job, turn);
      break;
    default:
      break;
  }
}

void CoreImpl::CheckExits(JobEntry& job, Turn& turn) {
  const v1::Attempt& attempt = job.record.attempt();
  // The culprit is the lowest rank that ended for a cause of its own. Without one it is the lowest
  // rank whose collective failed, which only tells that another rank vanished.
  const std::pair<const int32_t, v1::RankExit>* culprit = nullptr;
  bool symptoms_only = true;
  size_t completed = 0;
  for (const auto& entry : job.exits) {
    if (entry.second.cause() == v1::CAUSE_COMPLETED) {
      ++completed;
      continue;
    }
    const bool symptom = IsSymptom(entry.second.cause());
    if (culprit == nullptr || (symptoms_only && !symptom)) culprit = &entry;
    symptoms_only = symptoms_only && symptom;
  }
  if (culprit != nullptr) {
    if (symptoms_only) {
      if (!job.symptom_at.has_value()) {
        job.symptom_at = turn.now();
        deadlines_.Set(AttemptDeadline(job), turn.now() + kCulpritGrace);
      }
      if (turn.now() < *job.symptom_at + kCulpritGrace) return;
    }
    const auto& [rank, exit] = *culprit;
    Stop(job,
         {exit.cause() == v1::CAUSE_UNSPECIFIED ? v1::CAUSE_UNKNOWN : exit.cause(),
          absl::StrCat("rank ", rank, " on ", attempt.placements(rank).worker(), " ",
                       HowExited(exit), "; see `muster logs ", job.job().name(), " --rank ", rank,
                       "`"),
          rank, exit.has_peer() ? exit.peer() : -1},
         turn);
    return;
  }
  if (attempt.state() == v1::ATTEMPT_STATE_TRAINING &&
      completed == static_cast<size_t>(attempt.placements_size())) {
    Stop(job, {v1::CAUSE_COMPLETED, "every rank has finished"}, turn);
  }
}

bool CoreImpl::AnyWorkerAway(const JobEntry& job) const {
  for (const v1::Placement& placement : job.record.attempt().placements()) {
    const WorkerEntry* worker = workers_.Find(WorkerId(placement.worker()));
    if (worker == nullptr || !worker->session.has_value() ||
        worker->row.state() != v1::WORKER_STATE_READY) {
      return true;
    }
  }
  return false;
}

void CoreImpl::CheckDeadlines(JobEntry& job, Turn& turn) {
  if (!job.record.has_attempt() || !IsUp(job.record.attempt().state())) {
    deadlines_.Clear(AttemptDeadline(job));
    return;
  }
  if (job.symptom_at.has_value()) {
    CheckExits(job, turn);
    if (!job.record.has_attempt() || !IsUp(job.record.attempt().state())) return;
  }
  const bool allocated = job.record.attempt().state() == v1::ATTEMPT_STATE_ALLOCATED;
  const absl::Duration limit = allocated ? kPrepareTimeout : config_.progress_timeout;
  absl::Time due = (allocated ? job.attempt_since : job.progress_at) + limit;
  if (turn.now() >= due && AnyWorkerAway(job)) {
    // A worker that is away may have prepared its ranks, or they may make progress; it tells when
    // it is back. When it is given up, so is the attempt.
    (allocated ? job.attempt_since : job.progress_at) = turn.now();
    due = turn.now() + limit;
  }
  if (turn.now() < due) {
    if (job.symptom_at.has_value()) due = std::min(due, *job.symptom_at + kCulpritGrace);
    deadlines_.Set(AttemptDeadline(job), due);
    return;
  }
  turn.Act(Measured{Measured::What::kDetectFailure, absl::ToDoubleSeconds(limit)});
  const auto& ranks = job.job().ranks();
  if (allocated) {
    const auto waited = std::find_if(ranks.begin(), ranks.end(), [](const auto& rank) {
      return rank.state() < v1::RANK_STATE_PREPARED;
    });
    Stop(job,
         {v1::CAUSE_LAUNCH,
          absl::StrCat("rank ", waited->rank(), " on ", waited->worker(),
                       " was not prepared within ", absl::FormatDuration(limit)),
          waited->rank()},
         turn);
    return;
  }
  const HangVerdict verdict = NameCulprit(job.progress, job.answered, job.job(), turn.now());
  std::string why =
      job.record.attempt().state() == v1::ATTEMPT_STATE_TRAINING
          ? absl::StrCat("no rank has finished a step for ", absl::FormatDuration(limit))
          : absl::StrCat("training had not begun: nothing new from any rank for ",
                         absl::FormatDuration(limit));
  if (verdict.rank >= 0) {
    const v1::RankStatus& rank = ranks[verdict.rank];
    const std::string phase = Bounded(job.progress[static_cast<size_t>(verdict.rank)].phase());
    absl::StrAppend(&why, "; rank ", verdict.rank, " on ", rank.worker(),
                    phase.empty() ? "" : absl::StrCat(" (", phase, ")"),
                    " is at fault: ", verdict.text);
  } else if (!verdict.text.empty()) {
    absl::StrAppend(&why, "; ", verdict.text);
  } else {
    const std::string phase = Bounded(job.progress.empty() ? "" : job.progress[0].phase());
    absl::StrAppend(&why, "; no rank is behind the others",
                    phase.empty() ? "" : absl::StrCat(", rank 0 is ", phase));
  }
  Stop(job, {v1::CAUSE_HANG, why, verdict.rank}, turn);
}

void CoreImpl::Stop(JobEntry& job, const StopReason& reason, Turn& turn) {
  v1::Attempt& attempt = *job.record.mutable_attempt();
  const bool trained = attempt.state() >= v1::ATTEMPT_STATE_TRAINING;
  attempt.set_stop_cause(reason.cause);
  std::string message = reason.message;
  attempt.clear_between();
  if ((reason.cause == v1::CAUSE_LAUNCH || reason.cause == v1::CAUSE_NETWORK) && reason.rank >= 0 &&
      reason.peer >= 0 && reason.peer < job.job().ranks_size()) {
    const v1::RankStatus& one = job.job().ranks(reason.rank);
    const v1::RankStatus& other = job.job().ranks(reason.peer);
    for (const std::string& worker : std::set<std::string>{one.worker(), other.worker()}) {
      attempt.add_between(worker);
    }
    message = absl::StrCat("between ", PlaceText(one), " and ", PlaceText(other), ": ", message);
  }
  attempt.set_stop_message(Bounded(message));
  attempt.set_stop_rank(reason.rank);
  Transition(job, AttemptEvent::kStop, attempt.stop_message(), turn);
  values_.Drop(job.id(), job.epoch(), turn);
  deadlines_.Clear(AttemptDeadline(job));
  job.symptom_at.reset();
  for (const v1::Placement& placement : attempt.placements()) {
    turn.DesiredChanged(WorkerId(placement.worker()));
  }
  switch (reason.cause) {
    case v1::CAUSE_COMPLETED:
      job.record.set_after_release(v1::JOB_STATE_SUCCEEDED);
      break;
    case v1::CAUSE_CANCELLED:
      job.record.set_after_release(v1::JOB_STATE_CANCELLED);
      Transition(job, JobEvent::kCancel, attempt.stop_message(), turn);
      break;
    default:
      job.record.set_after_release(BudgetOf(reason.cause, trained) == Budget::kNotRetried
                                       ? v1::JOB_STATE_FAILED
                                       : v1::JOB_STATE_QUEUED);
      job.failed_at = turn.now();
      Transition(job, JobEvent::kAttemptFailed, attempt.stop_message(), turn);
      job.job().set_waiting(
          "its last attempt is being ended; it waits for the proof that its devices are free");
  }
  FreeReleased(job, turn);
}

void CoreImpl::FreeReleased(JobEntry& job, Turn& turn) {
  bool held = false;
  for (const v1::Placement& placement : job.record.attempt().placements()) {
    if (!workers_.Holds(placement, job.id(), job.epoch())) continue;
    if (job.job().ranks(placement.rank()).state() < v1::RANK_STATE_RELEASED) {
      held = true;
      continue;
    }
    workers_.Free(placement, job.id(), job.epoch());
    turn.DesiredChanged(WorkerId(placement.worker()));
    turn.Reschedule();
  }
  if (!held) Release(job, turn);
}

v1::AttemptEnd CoreImpl::EndOf(JobEntry& job, Turn& turn) const {
  const v1::Attempt& attempt = job.record.attempt();
  v1::AttemptEnd end;
  end.set_epoch(attempt.epoch());
  end.set_cause(attempt.stop_cause());
  end.set_message(attempt.stop_message());
  end.set_rank(attempt.stop_rank());
  // Commits are durable at once and progress is not, so that after a restart of the coordinator the
  // committed step may be the larger one.
  end.set_step(std::max(job.job().step(), job.job().last_committed_step()));
  *end.mutable_started() = attempt.started();
  *end.mutable_ended() = ToProto(turn.now());
  // Decided at the release: until then a checkpoint that was written completely may be committed,
  // and an attempt that advanced the committed step does not count.
  const bool advanced =
      job.job().last_committed_step() > job.record.committed_step_at_attempt_start();
  *end.mutable_between() = attempt.between();
  // Two workers that lose each other once do not count. When the same two do so twice in a row, the
  // network has to be repaired, and the job must not retry for ever.
  const auto& ends = job.job().causes();
  const bool again = !end.between().empty() && !ends.empty() &&
                     std::equal(end.between().begin(), end.between().end(),
                                ends.rbegin()->between().begin(), ends.rbegin()->between().end());
  end.set_counted((BudgetOf(end.cause(), /*trained=*/true) == Budget::kCounted || again) &&
                  !advanced && job.record.after_release() != v1::JOB_STATE_FAILED);
  return end;
}

void CoreImpl::Release(JobEntry& job, Turn& turn) {
  Transition(job, AttemptEvent::kAllReleased, "its devices are accounted for", turn);
  v1::Job& proto = job.job();
  const v1::AttemptEnd end = EndOf(job, turn);
  proto.clear_phase();
  *proto.add_causes() = end;
  while (proto.causes_size() > kAttemptEndsMax) {
    proto.mutable_causes()->DeleteSubrange(0, 1);
  }
  v1::Event row = About(job, v1::EVENT_KIND_ATTEMPT_ENDED);
  row.set_cause(end.cause());
  row.set_rank(end.rank());
  row.set_message(end.message());
  *row.mutable_between() = end.between();
  turn.Log(std::move(row));
  v1::Attempt& past = *job.record.add_past_attempts();
  past = job.record.attempt();
  past.clear_restore();
  while (job.record.past_attempts_size() > kPastAttemptsMax) {
    job.record.mutable_past_attempts()->DeleteSubrange(0, 1);
  }
  const v1::JobState after = job.record.after_release();
  job.record.clear_attempt();
  job.record.clear_after_release();
  turn.Persist(job.id());
  turn.Reschedule();
  if (end.counted()) proto.set_failures(proto.failures() + 1);
  switch (after) {
    case v1::JOB_STATE_SUCCEEDED:
      Transition(job, JobEvent::kCompleted, "trained all steps", turn);
      break;
    case v1::JOB_STATE_CANCELLED:
      proto.set_message("cancelled by a user");
      Transition(job, JobEvent::kReleased, "its devices are accounted for", turn);
      break;
    case v1::JOB_STATE_FAILED:
      proto.set_message(absl::StrCat(CauseText(end.cause()), ": ", end.message()));
      Transition(job, JobEvent::kGivenUp, proto.message(), turn);
      break;
    default:
      AfterFailure(job, end, turn);
  }
}

void CoreImpl::AfterFailure(JobEntry& job, const v1::AttemptEnd& end, Turn& turn) {
  v1::Job& proto = job.job();
  const bool advanced = proto.last_committed_step() > job.record.committed_step_at_attempt_start();
  const int in_a_row = (advanced ? 0 : job.record.restarts_in_a_row()) + 1;
  job.record.set_restarts_in_a_row(in_a_row);
  int launches = 0;
  for (int i = proto.causes_size(); i > 0 && proto.causes(i - 1).cause() == v1::CAUSE_LAUNCH; --i) {
    ++launches;
  }
  std::string given_up;
  if (proto.failures() > proto.spec().restart().max_failures()) {
    given_up = absl::StrCat("failed ", proto.failures(), " time(s), restart.max_failures is ",
                            proto.spec().restart().max_failures());
  } else if (launches >= kLaunchFailuresMax) {
    given_up = absl::StrCat("could not be started ", launches, " times in a row");
  } else if (in_a_row >= kRestartsInARowMax) {
    given_up = absl::StrCat("restarted ", in_a_row, " times without a newly committed step");
  }
  if (!given_up.empty()) {
    proto.set_message(
        absl::StrCat(given_up, "; last: ", CauseText(end.cause()), ": ", end.message()));
    Transition(job, JobEvent::kGivenUp, proto.message(), turn);
    return;
  }
  const absl::Duration wait =
      BackoffBefore(proto.spec().restart().backoff(), end.cause(), in_a_row);
  *job.record.mutable_not_before() = ToProto(turn.now() + wait);
  Wait(job, turn);
}

}  // namespace muster::coordinator
