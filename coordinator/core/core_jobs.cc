#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "coordinator/scheduler/placement.h"
#include "proto/job_state.h"
#include "proto/spec/deadline.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/time.h"
#include "security/authorize.h"

namespace muster::coordinator {

JobId CoreImpl::NewJobId(const std::string& name) {
  while (true) {
    JobId id(absl::StrCat(name, "-", rng_.Letters(5)));
    if (jobs_.Find(id) == nullptr) return id;
  }
}

absl::Status CoreImpl::CheckRequestId(const std::string& request_id) {
  if (request_id.size() <= kRequestIdBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("request_id: ", request_id.size(), " bytes; at most ", kRequestIdBytesMax));
}

void CoreImpl::On(SubmitEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = Submit(event, reply, turn);
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::Submit(SubmitEvent& event, ReplyAction& reply, Turn& turn) {
  RETURN_IF_ERROR(CheckRequestId(event.request_id));
  if (JobEntry* first = event.request_id.empty() ? nullptr : jobs_.FindRequest(event.request_id)) {
    if (first->fixed.owner() != event.caller.principal.Owner()) {
      return absl::AlreadyExistsError(
          "request_id: another user has sent it; choose a new one for each submission");
    }
    reply.job = first->View();
    reply.existed = true;
    return absl::OkStatus();
  }
  if (jobs_.live_count() >= kLiveJobsMax) {
    RETURN_IF_ERROR(CheckArrayName(event.spec.name()));  // the nearer cause
    return absl::ResourceExhaustedError(
        absl::StrCat("the cluster has as many unfinished jobs as it can hold, ", kLiveJobsMax,
                     "; wait for one to end or cancel one"));
  }
  ASSIGN_OR_RETURN(Submission submission, CheckSubmission(std::move(event.spec), turn.now()));
  JobEntry& entry = Accept(std::move(submission), event.request_id, event.caller, turn);
  while (turn.TakeReschedule()) Schedule(turn);  // before the reply, which says why the job waits
  reply.job = entry.View();
  return absl::OkStatus();
}

absl::StatusOr<CoreImpl::Submission> CoreImpl::CheckSubmission(v1::JobSpec spec,
                                                               absl::Time now) const {
  RETURN_IF_ERROR(CheckArrayName(spec.name()));
  // An elastic job has to fit with its smallest size.
  const std::vector<int32_t> sizes = spec::SizesOf(spec);
  if (sizes.empty()) {
    return absl::InvalidArgumentError("resources.ranks: no number of ranks is possible");
  }
  RETURN_IF_ERROR(scheduling_.tree().CheckJob(spec.queue(), spec.resources().device(),
                                              sizes.front(), spec::ShareOf(spec)));
  RETURN_IF_ERROR(spec::FixDeadline(spec, now));
  Submission submission;
  ASSIGN_OR_RETURN(submission.after, DependenciesOf(spec, jobs_));
  submission.spec = std::move(spec);
  return submission;
}

JobEntry& CoreImpl::Accept(Submission submission, const std::string& request_id,
                           const Caller& caller, Turn& turn) {
  JobEntry fresh;
  fresh.fixed.set_id(NewJobId(submission.spec.name()).value());
  fresh.fixed.set_name(submission.spec.name());
  *fresh.fixed.mutable_spec() = std::move(submission.spec);
  fresh.fixed.set_request_id(request_id);
  fresh.fixed.set_submit_sequence(jobs_.NextSequence());
  *fresh.fixed.mutable_submitted() = ToProto(turn.now());
  fresh.fixed.set_owner(caller.principal.Owner());
  fresh.state.set_state(v1::JOB_STATE_PENDING);
  fresh.state.set_stop_rank(-1);
  fresh.state.mutable_after()->Add(submission.after.begin(), submission.after.end());
  fresh.queued_at = fresh.progress_stored_at = turn.now();
  JobEntry& entry = jobs_.Add(std::move(fresh));
  entry.PutSpec(turn.batch());
  const JobId id = entry.id();
  if (!request_id.empty()) {
    turn.batch().Put(Table::kRequests, request_id, id.value());
  }
  v1::Event accepted = About(entry, v1::EVENT_KIND_JOB_STATE);
  accepted.set_to(spec::EnumName(v1::JOB_STATE_PENDING));
  accepted.set_message("accepted");
  turn.Log(std::move(accepted));
  turn.Persist(id);
  states_.Transition(entry, JobEvent::kAdmitted, absl::StrCat("joins queue ", entry.spec().queue()),
                     turn);
  states_.Wait(entry, turn);
  CheckJobDeadline(entry, turn);
  return entry;
}

void CoreImpl::On(const CancelEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  const absl::StatusOr<const JobEntry*> found = jobs_.Resolve(event.job);
  if (!found.ok()) {
    reply.status = found.status();
    turn.Act(std::move(reply));
    return;
  }
  JobEntry& job = *jobs_.Find((*found)->id());
  reply.status =
      security::AuthorizeChange(event.caller.principal, job.fixed.owner(), job.spec().queue());
  if (!reply.status.ok()) {
    turn.Act(std::move(reply));
    return;
  }
  CancelJob(job, turn);
  reply.job = job.View();
  turn.Act(std::move(reply));
}

void CoreImpl::CancelJob(JobEntry& job, Turn& turn) {
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

void CoreImpl::CarryOut(const Start& start, Turn& turn) {
  scheduling_.Remove(start.job);
  if (start.in_turn) scheduling_.TookTurn(jobs_.Find(start.job)->spec().queue(), turn.now());
  kept_.Drop(*jobs_.Find(start.job), turn);
  attempts_.Allocate(*jobs_.Find(start.job), start.placements, turn);
}

absl::StatusOr<Explained> CoreImpl::Explain(const ExplainQuery& about, absl::Time now) {
  if (const auto* name = std::get_if<std::string>(&about); name != nullptr) {
    const Array* array = jobs_.FindArray(*name);
    const absl::StatusOr<const JobEntry*> job = jobs_.Resolve(*name);
    if (array != nullptr && (!job.ok() || (*job)->fixed.submit_sequence() < array->sequence)) {
      Explained out;
      out.array = OutlookOf(*array, now);
      return out;
    }
  }
  ASSIGN_OR_RETURN(Explained out, ExplainWait(about, now));
  const v1::WaitReason* waiting = out.waiting.has_value() ? &*out.waiting : nullptr;
  if (const JobEntry* job = jobs_.Find(JobId(out.job.id())); job != nullptr) {
    out.deadline = OutlookOf(*job, waiting, now);
  } else {
    JobEntry entry;
    *entry.fixed.mutable_spec() = out.job.spec();
    out.deadline = OutlookOf(entry, waiting, now);
  }
  return out;
}

absl::StatusOr<Explained> CoreImpl::ExplainWait(const ExplainQuery& about, absl::Time now) {
  Explained out;
  std::optional<WaitingJob> added;
  JobId id;
  if (const auto* name = std::get_if<std::string>(&about)) {
    ASSIGN_OR_RETURN(const JobEntry* job, jobs_.Resolve(*name));
    out.job = job->View();
    if (out.job.has_waiting()) out.waiting = out.job.waiting();
    id = job->id();
    if (!scheduling_.Waits(id)) return out;
  } else {
    JobEntry entry;
    entry.fixed.set_name(std::get<v1::JobSpec>(about).name());
    entry.fixed.set_id("(the spec)");  // no job has such an id
    *entry.fixed.mutable_spec() = std::get<v1::JobSpec>(about);
    RETURN_IF_ERROR(spec::FixDeadline(*entry.fixed.mutable_spec(), now));
    *entry.state.mutable_queued() = ToProto(now);
    RETURN_IF_ERROR(
        scheduling_.tree().CheckJob(entry.spec().queue(), entry.spec().resources().device(),
                                    entry.sizes().front(), spec::ShareOf(entry.spec())));
    entry.fixed.set_submit_sequence(jobs_.NextSequence());
    out.job.set_name(entry.name());
    out.job.set_steps(entry.steps());
    *out.job.mutable_spec() = entry.spec();
    ASSIGN_OR_RETURN(const std::vector<v1::Dependency> after, DependenciesOf(entry.spec(), jobs_));
    if (!after.empty()) {
      entry.state.mutable_after()->Add(after.begin(), after.end());
      out.waiting = WaitFor(entry.spec(), entry.state.after());
      return out;
    }
    id = entry.id();
    added = AsWaiting(entry);
  }
  Forecast forecast = scheduling_.Explain(id, std::move(added), now);
  if (!forecast.start.has_value()) {
    out.waiting = std::move(forecast.reason);
  } else if (std::holds_alternative<v1::JobSpec>(about)) {
    out.waiting.reset();
    out.placements = std::move(forecast.start->placements);
    JobEntry entry;
    *entry.fixed.mutable_spec() = std::get<v1::JobSpec>(about);
    WaitingJob placed = AsWaiting(entry);
    if (entry.elastic()) placed = AtSize(placed, static_cast<int32_t>(out.placements.size()));
    *out.job.mutable_placement_cost() = CostOf(workers_.slots(), placed, out.placements);
    for (v1::Placement& placement : out.placements) {
      placement.set_host(workers_.Find(WorkerId(placement.worker()))->row.host());
    }
  }
  return out;
}

void CoreImpl::Schedule(Turn& turn) {
  for (const JobId& id : scheduling_.TakeRetries(turn.now())) {
    JobEntry& job = *jobs_.Find(id);
    if (job.state.state() != v1::JOB_STATE_RECOVERING) continue;
    states_.Transition(job, JobEvent::kRetry, "its devices are released, and no back-off keeps it",
                       turn);
  }
  muster::coordinator::Schedule plan = scheduling_.MakePlan(turn.now());
  if (!plan.decisions.empty()) {
    *turn.log_entry().add_plans() = RecordPlan(plan.decisions, jobs_, scheduling_, workers_);
  }
  for (const Decision& decision : plan.decisions) {
    std::visit([&](const auto& decided) { CarryOut(decided, turn); }, decision);
  }
  for (const Explanation& explanation : plan.explanations) {
    // One that this plan explained may have started by one of its later decisions.
    if (!scheduling_.Waits(explanation.job)) continue;
    JobStates::Explain(*jobs_.Find(explanation.job), explanation.reason(), turn);
  }
  deadlines_.Set({DeadlineKey::Kind::kSchedule, ""}, std::min(plan.wake_at, plan.again_at));
}

}  // namespace muster::coordinator
