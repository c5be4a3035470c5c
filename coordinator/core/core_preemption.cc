// Jobs that stop for others or because a user says so, slots that are kept meanwhile, and holds.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "proto/job_state.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/time.h"
#include "security/authorize.h"

namespace muster::coordinator {
namespace {

// "2, 4 and 8"; of many the first and the last.
std::string SizesText(const std::vector<int32_t>& sizes) {
  constexpr size_t kNamedMax = 16;
  std::vector<int32_t> named(
      sizes.begin(), sizes.begin() + static_cast<int64_t>(std::min(kNamedMax, sizes.size())));
  std::string text = absl::StrJoin(named, ", ");
  if (sizes.size() > kNamedMax) absl::StrAppend(&text, ", ..., ", sizes.back());
  return text;
}

absl::Status WrongState(const JobEntry& job, absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat("job ", job.fixed.id(), " is ", spec::EnumName(job.state.state()), why));
}

}  // namespace

// ---- for another job ----------------------------------------------------------------------------

void CoreImpl::CarryOut(const Preempt& preempt, Turn& turn) {
  JobEntry& winner = *jobs_.Find(preempt.job);
  const Eviction& eviction = preempt.eviction;
  for (const JobId& id : eviction.outbid) kept_.Drop(*jobs_.Find(id), turn);
  kept_.Drop(winner, turn);
  const v1::JobSpec& spec = winner.spec();
  kept_.Keep(winner, eviction.slots);
  std::vector<std::string> stopped;
  for (const JobId& id : eviction.stopped) {
    const JobEntry& job = *jobs_.Find(id);
    stopped.push_back(absl::StrCat("job ", job.name(), " (priority ", job.spec().priority(), ")"));
  }
  v1::Event row = About(winner, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message(
      absl::StrCat(eviction.slots.size(), " slot(s) are kept for it (priority ", spec.priority(),
                   ")", stopped.empty() ? "" : "; stopped for it: ", absl::StrJoin(stopped, ", ")));
  turn.Log(std::move(row));
  turn.Persist(winner.id());
  for (const JobId& id : eviction.stopped) {
    Yield(*jobs_.Find(id),
          absl::StrCat("its devices are wanted for job ", winner.name(), " (priority ",
                       spec.priority(), ")"),
          turn);
  }
}

void CoreImpl::CarryOut(const Resize& resize, Turn& turn) {
  JobEntry& job = *jobs_.Find(resize.resized.job);
  const size_t ranks = resize.resized.slots.size();
  std::string why = absl::StrCat("from ", job.size(), " to ", ranks, " rank(s): ");
  if (!resize.for_job.value().empty()) {
    const JobEntry& other = *jobs_.Find(resize.for_job);
    absl::StrAppend(&why, "devices are wanted for job ", other.name(), " (priority ",
                    other.spec().priority(), ")");
  } else if (job.state.ranks_wanted() != 0) {
    absl::StrAppend(&why, "a user asked for it");
  } else {
    absl::StrAppend(&why, "devices are free that no job waits for");
  }
  kept_.Keep(job, resize.resized.slots);
  v1::Event row = About(job, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message(absl::StrCat(ranks, " slot(s) are kept for it, with which it goes on"));
  turn.Log(std::move(row));
  attempts_.Stop(job, {.cause = v1::CAUSE_RESIZED, .message = why, .yields = true, .resizes = true},
                 turn);
}

void CoreImpl::CarryOut(const GiveUpKept& give_up, Turn& turn) {
  JobEntry& job = *jobs_.Find(give_up.job);
  v1::Event row = About(job, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message("the slots kept for it are given up: one of them is gone");
  turn.Log(std::move(row));
  kept_.Drop(job, turn);
}

void CoreImpl::Yield(JobEntry& job, const std::string& why, Turn& turn) {
  attempts_.Stop(job, {.cause = v1::CAUSE_PREEMPTED, .message = why, .yields = true}, turn);
}

// Whether a job whose ranks were asked to stop has nothing left to do. Ranks of the engine end with
// success only then. A command that saves a checkpoint when it is asked to stop often exits with 0,
// too: one that goes on from its checkpoint counts as finished if it has said that it did all of
// its steps. Where it had finished without saying so, its next attempt finds nothing to do.
bool Finished(const JobEntry& job) {
  if (job.gang.completed() != job.gang.size()) return false;
  const bool goes_on = job.runs_command() && (job.spec().resources().rank_range().resumes() ||
                                              job.state.last_committed_step() > 0);
  return !goes_on || (job.steps() > 0 && job.progress.step() >= job.steps());
}

void CoreImpl::AfterYield(JobEntry& job, Turn& turn) {
  if (Finished(job)) {
    kept_.Drop(job, turn);
    return states_.Transition(job, JobEvent::kCompleted,
                              "trained all steps before it could be stopped", turn);
  }
  if (!job.state.held_by().empty()) return Hold(job, turn);
  states_.Transition(job, JobEvent::kYielded, "its devices are released", turn);
  states_.Wait(job, turn);
}

void CoreImpl::EndReleasedAttempts(Turn& turn) {
  for (const JobId& id : attempts_.FreeReleased(turn)) {
    JobEntry& job = *jobs_.Find(id);
    AfterRelease(job, attempts_.Release(job, turn), turn);
  }
}

void CoreImpl::AfterRelease(JobEntry& job, const Attempts::Released& released, Turn& turn) {
  const v1::AttemptEnd& end = released.end;
  if (job.state.state() == v1::JOB_STATE_PREEMPTING ||
      job.state.state() == v1::JOB_STATE_RESIZING) {
    AfterYield(job, turn);
    return CheckJobDeadline(job, turn);
  }
  switch (released.after) {
    case v1::JOB_STATE_SUCCEEDED:
      states_.Transition(
          job, JobEvent::kCompleted,
          job.runs_command() ? "every rank exited with status 0" : "trained all steps", turn);
      break;
    case v1::JOB_STATE_CANCELLED:
      job.state.set_message("cancelled by a user");
      states_.Transition(job, JobEvent::kReleased, "its devices are accounted for", turn);
      break;
    case v1::JOB_STATE_FAILED:
      job.state.set_message(absl::StrCat(CauseText(end.cause()), ": ", end.message()));
      states_.Transition(job, JobEvent::kGivenUp, job.state.message(), turn);
      break;
    default:
      AfterFailure(job, end, turn);
      CheckJobDeadline(job, turn);
  }
}

void CoreImpl::AfterFailure(JobEntry& job, const v1::AttemptEnd& end, Turn& turn) {
  const bool advanced =
      job.state.last_committed_step() > job.state.committed_step_at_attempt_start();
  if (IsFaultOfCluster(end.cause())) {
    job.state.set_recovering_ranks(job.attempt.placements_size());
  }
  const int in_a_row = (advanced ? 0 : job.state.restarts_in_a_row()) + 1;
  job.state.set_restarts_in_a_row(in_a_row);
  int launches = 0;
  for (auto past = job.ends.rbegin(); past != job.ends.rend() && past->cause() == v1::CAUSE_LAUNCH;
       ++past) {
    ++launches;
  }
  std::string given_up;
  if (job.state.failures() > job.spec().restart().max_failures()) {
    given_up = absl::StrCat("failed ", job.state.failures(), " time(s), restart.max_failures is ",
                            job.spec().restart().max_failures());
  } else if (launches >= kLaunchFailuresMax) {
    given_up = absl::StrCat("could not be started ", launches, " times in a row");
  } else if (in_a_row >= kRestartsInARowMax) {
    given_up = absl::StrCat("restarted ", in_a_row, " times without a newly committed step");
  }
  if (!given_up.empty()) {
    job.state.set_message(
        absl::StrCat(given_up, "; last: ", CauseText(end.cause()), ": ", end.message()));
    states_.Transition(job, JobEvent::kGivenUp, job.state.message(), turn);
    return;
  }
  const absl::Duration wait = BackoffBefore(job.spec().restart().backoff(), end.cause(), in_a_row);
  *job.state.mutable_not_before() = ToProto(turn.now() + wait);
  if (!job.state.held_by().empty()) return Hold(job, turn);
  states_.Wait(job, turn);
}

// ---- for a user ---------------------------------------------------------------------------------

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
    if (reply.status.ok()) reply.status = Change(job, event, turn);
    while (turn.TakeReschedule()) Schedule(turn);  // the reply says where it stands
    reply.job = job.View();
  }
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::Change(JobEntry& job, const ChangeJobEvent& event, Turn& turn) {
  using Change = ChangeJobEvent::Change;
  if (event.reason.size() > kReasonBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("reason: ", event.reason.size(), " bytes; at most ", kReasonBytesMax));
  }
  if (!job.live()) return WrongState(job, ": it has ended");
  const std::string why =
      absl::StrCat("by ", event.caller.actor, event.reason.empty() ? "" : ": ", event.reason);
  switch (event.change) {
    case Change::kPreempt:
      if (job.state.state() == v1::JOB_STATE_PREEMPTING) return absl::OkStatus();
      if (!job.up()) return WrongState(job, ": only a job that runs can be preempted");
      Yield(job, absl::StrCat("preempted ", why), turn);
      return absl::OkStatus();
    case Change::kSuspend:
      return Suspend(job, event, absl::StrCat("suspended ", why), turn);
    case Change::kHold:
      if (job.up()) {
        return WrongState(job, absl::StrCat(": `muster suspend ", job.name(),
                                            "` stops a job that runs, and holds it"));
      }
      return Suspend(job, event, absl::StrCat("held ", why), turn);
    case Change::kRelease:
      Unhold(job, absl::StrCat("released ", why), turn);
      return absl::OkStatus();
    case Change::kRequeue:
      return Requeue(job, absl::StrCat("requeued ", why), turn);
    case Change::kResize:
      return SetSize(job, event, turn);
  }
  return absl::InternalError("no such change of a job");
}

absl::Status CoreImpl::SetSize(JobEntry& job, const ChangeJobEvent& event, Turn& turn) {
  if (!job.elastic()) {
    return absl::FailedPreconditionError(
        absl::StrCat("job ", job.fixed.id(), " is not elastic: its resources.ranks is ",
                     job.spec().resources().ranks(), ", not a range {min: ..., max: ...}"));
  }
  const std::vector<int32_t>& sizes = job.sizes();
  if (event.ranks != 0 && !std::binary_search(sizes.begin(), sizes.end(), event.ranks)) {
    return absl::InvalidArgumentError(
        absl::StrCat("ranks: job ", job.fixed.id(), " cannot run with ", event.ranks,
                     "; it can with ", SizesText(sizes), ", or auto"));
  }
  if (job.up() && event.ranks != 0 && event.ranks != job.size() &&
      !spec::ResizesWhileRunning(job.spec())) {
    return WrongState(
        job, job.runs_command()
                 ? ": its command does not say that it goes on from a checkpoint with other ranks "
                   "(resources.ranks.resumes), so that it cannot be resized while it runs"
                 : ": it has no `checkpoint`, so that it would start over; it cannot be resized "
                   "while it runs");
  }
  if (job.state.ranks_wanted() == event.ranks) return absl::OkStatus();
  job.state.set_ranks_wanted(event.ranks);
  v1::Event row = About(job, v1::EVENT_KIND_RESIZE_ASKED);
  row.set_message(
      absl::StrCat(event.ranks == 0 ? "its number of ranks is left to the scheduler"
                                    : absl::StrCat("it is to have ", event.ranks, " rank(s)"),
                   ", by ", event.caller.actor, event.reason.empty() ? "" : ": ", event.reason));
  turn.Log(std::move(row));
  turn.Persist(job.id());
  scheduling_.ChangeRunning(job.id(),
                            [&](RunningJob& running) { running.elastic = ElasticityOf(job); });
  if (scheduling_.Waits(job.id())) {
    // It is another job to the scheduler.
    kept_.Drop(job, turn);
    scheduling_.Remove(job.id());
    states_.Wait(job, turn);
  }
  turn.Reschedule();
  return absl::OkStatus();
}

absl::Status CoreImpl::Suspend(JobEntry& job, const ChangeJobEvent& event, const std::string& why,
                               Turn& turn) {
  if (job.state.state() == v1::JOB_STATE_STOPPING)
    return WrongState(job, ": it is being cancelled");
  if (job.has_attempt() && !job.up() && job.state.after_release() != v1::JOB_STATE_QUEUED) {
    return WrongState(job, ": it is about to end");
  }
  if (!job.state.held_by().empty()) return absl::OkStatus();
  job.state.set_held_by(event.caller.actor);
  *job.state.mutable_held_since() = ToProto(turn.now());
  turn.Persist(job.id());
  if (job.up()) {
    Yield(job, why, turn);
  } else if (!job.has_attempt()) {
    Hold(job, turn);
  }  // else it is held once its devices are released
  return absl::OkStatus();
}

void CoreImpl::Hold(JobEntry& job, Turn& turn) {
  kept_.Drop(job, turn);
  if (scheduling_.Remove(job.id())) turn.Reschedule();
  states_.Transition(job, JobEvent::kHold, absl::StrCat("held by ", job.state.held_by()), turn);
  job.waiting = JobStates::HeldReason(job);
}

void CoreImpl::Unhold(JobEntry& job, const std::string& why, Turn& turn) {
  if (job.state.held_by().empty()) return;
  job.state.clear_held_by();
  job.state.clear_held_since();
  turn.Persist(job.id());
  if (job.state.state() != v1::JOB_STATE_HELD) return;
  job.state.clear_not_before();
  states_.Transition(job, JobEvent::kUnhold, why, turn);
  states_.Wait(job, turn);
}

absl::Status CoreImpl::Requeue(JobEntry& job, const std::string& why, Turn& turn) {
  if (job.up()) {
    attempts_.Stop(job, {.cause = v1::CAUSE_CANCELLED, .message = why, .yields = true}, turn);
    return absl::OkStatus();
  }
  if (job.state.state() == v1::JOB_STATE_QUEUED &&
      (!job.state.after().empty() || jobs_.arrays().Waits(job))) {
    return absl::OkStatus();
  }
  if (job.has_attempt() || !scheduling_.Waits(job.id())) {
    return WrongState(job, job.state.state() == v1::JOB_STATE_HELD
                               ? absl::StrCat(": `muster release ", job.name(), "` ends that")
                               : std::string(": its devices are being released"));
  }
  if (job.state.state() != v1::JOB_STATE_RECOVERING) return absl::OkStatus();
  job.state.clear_not_before();
  scheduling_.Remove(job.id());
  states_.Transition(job, JobEvent::kRetry, why, turn);
  states_.Wait(job, turn);
  return absl::OkStatus();
}

}  // namespace muster::coordinator
