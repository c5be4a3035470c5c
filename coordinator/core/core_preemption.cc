// Jobs that stop for others or because a user says so, slots that are kept meanwhile, and holds.
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "proto/job_state.h"
#include "proto/spec/names.h"
#include "proto/time.h"
#include "security/authorize.h"

namespace muster::coordinator {
namespace {

absl::Status WrongState(const JobEntry& job, absl::string_view why) {
  return absl::FailedPreconditionError(
      absl::StrCat("job ", job.fixed.id(), " is ", spec::EnumName(job.state.state()), why));
}

}  // namespace

// ---- for another job ----------------------------------------------------------------------------

void CoreImpl::CarryOut(const Preempt& preempt, Turn& turn) {
  JobEntry& winner = *jobs_.Find(preempt.job);
  const Eviction& eviction = preempt.eviction;
  for (const JobId& id : eviction.outbid) DropKept(*jobs_.Find(id), turn);
  DropKept(winner, turn);
  const v1::JobSpec& spec = winner.spec();
  Kept kept{spec.queue(), spec.priority(), spec.resources().device(), AsWaiting(winner).tenant, {}};
  for (const Slot& slot : eviction.slots) {
    workers_.Keep(slot.worker, slot.device, winner.id());
    v1::KeptSlot& stored = *winner.state.add_kept();
    stored.set_worker(slot.worker.value());
    stored.set_device(slot.device);
    kept.slots.insert(slot);
  }
  scheduling_.Keep(winner.id(), std::move(kept));
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

void CoreImpl::CarryOut(const GiveUpKept& give_up, Turn& turn) {
  JobEntry& job = *jobs_.Find(give_up.job);
  v1::Event row = About(job, v1::EVENT_KIND_SLOTS_KEPT);
  row.set_message("the slots kept for it are given up: one of them is gone");
  turn.Log(std::move(row));
  DropKept(job, turn);
}

void CoreImpl::DropKept(JobEntry& job, Turn& turn) {
  if (job.state.kept().empty()) return;
  for (const v1::KeptSlot& slot : job.state.kept()) {
    workers_.DropKept(WorkerId(slot.worker()), slot.device(), job.id());
  }
  job.state.clear_kept();
  scheduling_.DropKept(job.id());
  turn.Persist(job.id());
  turn.Reschedule();
}

void CoreImpl::RecoverKept(JobEntry& job) {
  if (job.state.kept().empty()) return;
  const v1::JobSpec& spec = job.spec();
  Kept kept{spec.queue(), spec.priority(), spec.resources().device(), AsWaiting(job).tenant, {}};
  for (const v1::KeptSlot& slot : job.state.kept()) {
    workers_.Keep(WorkerId(slot.worker()), slot.device(), job.id());
    kept.slots.insert({WorkerId(slot.worker()), slot.device()});
  }
  scheduling_.Keep(job.id(), std::move(kept));
}

void CoreImpl::Yield(JobEntry& job, const std::string& why, Turn& turn) {
  Stop(job, {.cause = v1::CAUSE_PREEMPTED, .message = why, .yields = true}, turn);
}

void CoreImpl::AfterYield(JobEntry& job, Turn& turn) {
  if (job.gang.completed() == job.gang.size()) {
    return Transition(job, JobEvent::kCompleted, "trained all steps before it could be stopped",
                      turn);
  }
  if (!job.state.held_by().empty()) return Hold(job, turn);
  Transition(job, JobEvent::kYielded, "its devices are released", turn);
  Wait(job, turn);
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
  }
  return absl::InternalError("no such change of a job");
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
  DropKept(job, turn);
  if (scheduling_.Remove(job.id())) turn.Reschedule();
  Transition(job, JobEvent::kHold, absl::StrCat("held by ", job.state.held_by()), turn);
  job.waiting = HeldReason(job);
}

void CoreImpl::Unhold(JobEntry& job, const std::string& why, Turn& turn) {
  if (job.state.held_by().empty()) return;
  job.state.clear_held_by();
  job.state.clear_held_since();
  turn.Persist(job.id());
  if (job.state.state() != v1::JOB_STATE_HELD) return;
  job.state.clear_not_before();
  Transition(job, JobEvent::kUnhold, why, turn);
  Wait(job, turn);
}

absl::Status CoreImpl::Requeue(JobEntry& job, const std::string& why, Turn& turn) {
  if (job.up()) {
    Stop(job, {.cause = v1::CAUSE_CANCELLED, .message = why, .yields = true}, turn);
    return absl::OkStatus();
  }
  if (!job.state.after().empty() && job.state.state() == v1::JOB_STATE_QUEUED) {
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
  Transition(job, JobEvent::kRetry, why, turn);
  Wait(job, turn);
  return absl::OkStatus();
}

v1::WaitReason CoreImpl::HeldReason(const JobEntry& job) {
  v1::WaitReason reason;
  reason.set_code(v1::WAIT_CODE_HELD);
  reason.set_queue(job.spec().queue());
  reason.set_ranks(job.spec().resources().ranks());
  reason.set_device(job.spec().resources().device());
  reason.set_held_by(job.state.held_by());
  *reason.mutable_held_since() = job.state.held_since();
  return reason;
}

// ---- invariants ---------------------------------------------------------------------------------

void CoreImpl::CheckKept(std::vector<std::string>& broken) const {
  std::set<std::pair<std::string, std::string>> stored;
  for (const auto& [id, job] : jobs_.entries()) {
    const auto kept = scheduling_.kept().find(id);
    const size_t known = kept == scheduling_.kept().end() ? 0 : kept->second.slots.size();
    if (known != static_cast<size_t>(job.state.kept_size())) {
      broken.push_back(absl::StrCat("job ", id.value(), ": the scheduler keeps ", known,
                                    " slots for it, not ", job.state.kept_size()));
    }
    if (job.state.kept_size() > 0 && !scheduling_.Waits(id)) {
      broken.push_back(absl::StrCat("job ", id.value(), ": slots are kept, but it does not wait"));
    }
    if (!job.live() && !job.state.held_by().empty()) {
      broken.push_back(absl::StrCat("job ", id.value(), " has ended and is held"));
    }
    for (const v1::KeptSlot& slot : job.state.kept()) {
      if (!stored.emplace(slot.worker(), slot.device()).second) {
        broken.push_back(
            absl::StrCat("slot ", slot.worker(), " ", slot.device(), " is kept for two jobs"));
      }
    }
  }
  for (const auto& [id, worker] : workers_.entries()) {
    for (const auto& [device, job] : worker.kept_for) {
      if (!stored.contains({id.value(), device})) {
        broken.push_back(absl::StrCat("slot ", id.value(), " ", device, " is kept for job ",
                                      job.value(), ", which does not know it"));
      }
    }
  }
}

}  // namespace muster::coordinator
