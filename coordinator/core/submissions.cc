#include "coordinator/core/submissions.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/dependencies.h"
#include "coordinator/core/limits.h"
#include "proto/spec/deadline.h"
#include "proto/spec/elastic.h"
#include "proto/spec/names.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {

JobId Submissions::NewJobId(const std::string& name) {
  while (true) {
    JobId id(absl::StrCat(name, "-", rng_.Letters(5)));
    if (jobs_.Find(id) == nullptr) return id;
  }
}

absl::Status Submissions::CheckRequestId(const std::string& request_id) {
  if (request_id.size() <= kRequestIdBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("request_id: ", request_id.size(), " bytes; at most ", kRequestIdBytesMax));
}

absl::StatusOr<JobEntry*> Submissions::Submit(SubmitEvent& event, ReplyAction& reply, Turn& turn) {
  RETURN_IF_ERROR(CheckRequestId(event.request_id));
  if (JobEntry* first = event.request_id.empty() ? nullptr : jobs_.FindRequest(event.request_id)) {
    if (first->fixed.owner() != event.caller.principal.Owner()) {
      return absl::AlreadyExistsError(
          "request_id: another user has sent it; choose a new one for each submission");
    }
    reply.existed = true;
    return first;
  }
  if (jobs_.live_count() >= kLiveJobsMax) {
    RETURN_IF_ERROR(CheckArrayName(event.spec.name()));  // the nearer cause
    return absl::ResourceExhaustedError(
        absl::StrCat("the cluster has as many unfinished jobs as it can hold, ", kLiveJobsMax,
                     "; wait for one to end or cancel one"));
  }
  ASSIGN_OR_RETURN(Submission submission, CheckSubmission(std::move(event.spec), turn.now()));
  return &Accept(std::move(submission), event.request_id, event.caller, turn);
}

absl::StatusOr<Submissions::Submission> Submissions::CheckSubmission(v1::JobSpec spec,
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

JobEntry& Submissions::Accept(Submission submission, const std::string& request_id,
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
  life_.CheckDeadline(entry, turn);
  return entry;
}

absl::Status Submissions::CheckArrayName(const std::string& name) const {
  if (const JobEntry* live = jobs_.FindLive(name); live != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat(
        "name: job ", live->fixed.id(), " of this name is ", spec::EnumName(live->state.state()),
        "; cancel it with `muster cancel ", name, "` or choose another name"));
  }
  const Array* array = jobs_.arrays().FindName(name);
  if (array != nullptr && !array->live.empty()) {
    return absl::AlreadyExistsError(absl::StrCat(
        "name: ", array->live.size(), " task(s) of the array of this name, ", array->id,
        ", have not ended; cancel them with `muster cancel ", name, "` or choose another name"));
  }
  return absl::OkStatus();
}

absl::Status Submissions::SubmitArray(const SubmitArrayEvent& event, ReplyAction& reply,
                                      Turn& turn) {
  const std::string& name = event.tasks[0].array_task().array();
  RETURN_IF_ERROR(CheckRequestId(event.request_id));
  if (JobEntry* first = event.request_id.empty() ? nullptr : jobs_.FindRequest(event.request_id)) {
    const Array* array = jobs_.arrays().FindId(first->spec().array_task().array_id());
    if (array == nullptr || first->fixed.owner() != event.caller.principal.Owner()) {
      return absl::AlreadyExistsError(
          "request_id: it was sent with another submission; choose a new one for each");
    }
    reply.array = ReportOf(*array);
    reply.array.set_changed(array->tasks);
    reply.existed = true;
    return absl::OkStatus();
  }
  if (jobs_.live_count() + event.tasks.size() > kLiveJobsMax) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the cluster can hold ", kLiveJobsMax, " unfinished jobs and has ", jobs_.live_count(),
        "; the array has ", event.tasks.size(), " tasks: wait, or submit fewer of them"));
  }
  RETURN_IF_ERROR(CheckArrayName(name));
  // All are checked before the first is accepted.
  std::vector<Submission> accepted;
  for (size_t i = 0; i < event.tasks.size(); ++i) {
    absl::StatusOr<Submission> task = CheckSubmission(event.tasks[i], turn.now());
    if (!task.ok()) {
      return absl::Status(task.status().code(),
                          absl::StrCat("task ", i, ": ", task.status().message()));
    }
    accepted.push_back(*std::move(task));
  }
  std::string id = NewJobId(name).value();
  while (jobs_.arrays().FindId(id) != nullptr) id = NewJobId(name).value();
  for (size_t i = 0; i < accepted.size(); ++i) {
    accepted[i].spec.mutable_array_task()->set_array_id(id);
    Accept(std::move(accepted[i]), i == 0 ? event.request_id : "", event.caller, turn);
  }
  reply.array = ReportOf(*jobs_.arrays().FindId(id));
  reply.array.set_changed(static_cast<int32_t>(event.tasks.size()));
  return absl::OkStatus();
}

}  // namespace muster::coordinator
