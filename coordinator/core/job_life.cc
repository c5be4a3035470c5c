#include "coordinator/core/job_life.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "coordinator/core/causes.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/planned_job.h"
#include "proto/job_state.h"
#include "proto/spec/deadline.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/time.h"
#include "security/authorize.h"

namespace muster::coordinator {
namespace {

constexpr int kRefusalsMax = 8;  // ArrayReport.refusals

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

}  // namespace

void JobLife::Yield(JobEntry& job, const std::string& why, Turn& turn) {
  attempts_.Stop(job, {.cause = v1::CAUSE_PREEMPTED, .message = why, .yields = true}, turn);
}

void JobLife::AfterYield(JobEntry& job, Turn& turn) {
  if (Finished(job)) {
    kept_.Drop(job, turn);
    return states_.Transition(job, JobEvent::kCompleted,
                              "trained all steps before it could be stopped", turn);
  }
  if (!job.state.held_by().empty()) return Hold(job, turn);
  states_.Transition(job, JobEvent::kYielded, "its devices are released", turn);
  states_.Wait(job, turn);
}

void JobLife::EndReleasedAttempts(Turn& turn) {
  for (const JobId& id : attempts_.FreeReleased(turn)) {
    JobEntry& job = *jobs_.Find(id);
    AfterRelease(job, attempts_.Release(job, turn), turn);
  }
}

void JobLife::AfterRelease(JobEntry& job, const Attempts::Released& released, Turn& turn) {
  const v1::AttemptEnd& end = released.end;
  if (end.counted()) job.state.set_failures(job.state.failures() + 1);
  if (job.state.state() == v1::JOB_STATE_PREEMPTING ||
      job.state.state() == v1::JOB_STATE_RESIZING) {
    AfterYield(job, turn);
    return CheckDeadline(job, turn);
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
      CheckDeadline(job, turn);
  }
}

void JobLife::AfterFailure(JobEntry& job, const v1::AttemptEnd& end, Turn& turn) {
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

absl::Status JobLife::Change(JobEntry& job, const ChangeJobEvent& event, Turn& turn) {
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

absl::Status JobLife::SetSize(JobEntry& job, const ChangeJobEvent& event, Turn& turn) {
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
  scheduling_.ChangeRunning(
      job.id(), [&](RunningJob& running) { running.elastic = ElasticityOf(job, reservations_); });
  if (scheduling_.Waits(job.id())) {
    // It is another job to the scheduler.
    kept_.Drop(job, turn);
    scheduling_.Remove(job.id());
    states_.Wait(job, turn);
  }
  turn.Reschedule();
  return absl::OkStatus();
}

absl::Status JobLife::Suspend(JobEntry& job, const ChangeJobEvent& event, const std::string& why,
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

void JobLife::Hold(JobEntry& job, Turn& turn) {
  kept_.Drop(job, turn);
  if (scheduling_.Remove(job.id())) turn.Reschedule();
  states_.Transition(job, JobEvent::kHold, absl::StrCat("held by ", job.state.held_by()), turn);
  job.waiting = JobStates::HeldReason(job);
}

void JobLife::Unhold(JobEntry& job, const std::string& why, Turn& turn) {
  if (job.state.held_by().empty()) return;
  job.state.clear_held_by();
  job.state.clear_held_since();
  turn.Persist(job.id());
  if (job.state.state() != v1::JOB_STATE_HELD) return;
  job.state.clear_not_before();
  states_.Transition(job, JobEvent::kUnhold, why, turn);
  states_.Wait(job, turn);
}

absl::Status JobLife::Requeue(JobEntry& job, const std::string& why, Turn& turn) {
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

void JobLife::Cancel(JobEntry& job, Turn& turn) {
  if (!job.live() || job.state.state() == v1::JOB_STATE_STOPPING) return;
  const std::string why = "cancelled by a user";
  if (job.state.after_release() != v1::JOB_STATE_SUCCEEDED) kept_.Drop(job, turn);
  if (!job.has_attempt()) {
    job.state.set_message(why);
    if (scheduling_.Remove(job.id())) turn.Reschedule();
    states_.Transition(job, JobEvent::kCancelIdle, why, turn);
  } else if (job.up()) {
    attempts_.Stop(job, {v1::CAUSE_CANCELLED, why}, turn);
  } else if (job.state.after_release() != v1::JOB_STATE_SUCCEEDED) {
    // Its attempt is already being released for another reason. A job that has trained all its
    // steps is not cancelled any more.
    job.state.set_after_release(v1::JOB_STATE_CANCELLED);
    states_.Transition(job, JobEvent::kCancel, why, turn);
  }
}

absl::Status JobLife::ChangeArray(const ChangeArrayEvent& event, v1::ArrayReport& report,
                                  Turn& turn) {
  const Array* array = jobs_.FindArray(event.array);
  if (array == nullptr) {
    return absl::NotFoundError(absl::StrCat("no array has the name or id ",
                                            spec::Quoted(event.array),
                                            "; `muster get jobs` lists them"));
  }
  if (event.reason.size() > kReasonBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("reason: ", event.reason.size(), " bytes; at most ", kReasonBytesMax));
  }
  for (const JobId& id : array->live) {
    const JobEntry& job = *jobs_.Find(id);
    RETURN_IF_ERROR(
        security::AuthorizeChange(event.caller.principal, job.fixed.owner(), job.spec().queue()));
  }
  report = ReportOf(*array);
  report.set_ended(static_cast<int32_t>(array->tasks - static_cast<int64_t>(array->live.size())));
  std::vector<JobId> live;
  for (const auto& [index, id] : array->jobs) {
    if (array->live.contains(id)) live.push_back(id);
  }
  for (const JobId& id : live) {
    JobEntry& job = *jobs_.Find(id);
    absl::Status changed;
    if (!event.change.has_value()) {
      Cancel(job, turn);
    } else {
      changed =
          Change(job, {event.call, id.value(), *event.change, event.reason, event.caller}, turn);
    }
    if (changed.ok()) {
      report.set_changed(report.changed() + 1);
      continue;
    }
    report.set_refused(report.refused() + 1);
    if (report.refusals_size() < kRefusalsMax) {
      report.add_refusals(std::string(changed.message()));
    }
  }
  return absl::OkStatus();
}

// ---- by a time
// -----------------------------------------------------------------------------------

void JobLife::CheckDeadline(JobEntry& job, Turn& turn) {
  const absl::Time deadline = spec::DeadlineOf(job.spec());
  if (!job.live() || deadline == absl::InfiniteFuture()) return;
  if (turn.now() < deadline) {
    deadlines_.Set({DeadlineKey::Kind::kJobDeadline, job.fixed.id()}, deadline);
    return;
  }
  const std::string why =
      absl::StrCat("it had not ended by its deadline, ", spec::DeadlineText(deadline));
  if (job.up()) return attempts_.Stop(job, {v1::CAUSE_DEADLINE, why}, turn);
  if (job.has_attempt()) return;  // Release looks at it again, if it has not ended then
  kept_.Drop(job, turn);
  if (scheduling_.Remove(job.id())) turn.Reschedule();
  job.state.set_message(absl::StrCat("deadline: ", why));
  states_.Transition(
      job,
      job.state.state() == v1::JOB_STATE_RECOVERING ? JobEvent::kGivenUp : JobEvent::kCannotStart,
      job.state.message(), turn);
}

}  // namespace muster::coordinator
