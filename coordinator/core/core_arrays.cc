// Arrays: their submission, and what is done to all of their tasks.
#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "proto/spec/names.h"
#include "security/authorize.h"

namespace muster::coordinator {
namespace {

constexpr int kRefusalsMax = 8;  // ArrayReport.refusals

v1::ArrayReport ReportOf(const Array& array) {
  v1::ArrayReport report;
  report.set_array(array.name);
  report.set_array_id(array.id);
  report.set_tasks(array.tasks);
  return report;
}

// What tasks of an array that wait for the same thing have in common.
std::string KeyOf(v1::WaitReason reason) {
  reason.clear_ahead();
  reason.clear_estimated_start();
  reason.clear_behind_more_than();
  reason.clear_until();
  reason.clear_reserved_start();
  reason.clear_held_since();
  return reason.SerializeAsString();
}

}  // namespace

absl::Status CoreImpl::CheckArrayName(const std::string& name) const {
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

void CoreImpl::On(const SubmitArrayEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = Submit(event, reply, turn);
  while (turn.TakeReschedule()) Schedule(turn);
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::Submit(const SubmitArrayEvent& event, ReplyAction& reply, Turn& turn) {
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

void CoreImpl::On(const ChangeArrayEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status = ChangeArray(event, reply.array, turn);
  while (turn.TakeReschedule()) Schedule(turn);
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::ChangeArray(const ChangeArrayEvent& event, v1::ArrayReport& report,
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
      CancelJob(job, turn);
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

v1::ArrayOutlook CoreImpl::OutlookOf(const Array& array, absl::Time now) {
  v1::ArrayOutlook outlook;
  outlook.set_array(array.name);
  outlook.set_array_id(array.id);
  outlook.set_tasks(array.tasks);
  outlook.set_ended(static_cast<int32_t>(array.tasks - static_cast<int64_t>(array.live.size())));
  std::map<std::string, v1::ArrayWait> reasons;  // by what is the same for all tasks
  const WaitingJob* next = nullptr;
  for (const auto& [index, id] : array.jobs) {
    if (!array.live.contains(id)) continue;
    const JobEntry& job = *jobs_.Find(id);
    if (job.has_attempt()) {
      outlook.set_running(outlook.running() + 1);
      continue;
    }
    outlook.set_waiting(outlook.waiting() + 1);
    v1::ArrayWait& wait = reasons[KeyOf(job.waiting)];
    if (wait.tasks() == 0) {
      *wait.mutable_reason() = job.waiting;
      wait.set_first_task(job.name());
    }
    wait.set_tasks(wait.tasks() + 1);
    const WaitingJob* waiting = scheduling_.FindWaiting(id);
    if (waiting == nullptr) continue;
    // One that backs off is not next as long as others are not.
    const auto rank = [now](const WaitingJob& one) {
      return std::make_pair(std::max(now, one.not_before), one.order());
    };
    if (next == nullptr || rank(*waiting) < rank(*next)) next = waiting;
  }
  std::vector<v1::ArrayWait> ordered;
  for (auto& [key, wait] : reasons) ordered.push_back(std::move(wait));
  std::stable_sort(ordered.begin(), ordered.end(),
                   [](const auto& a, const auto& b) { return a.tasks() > b.tasks(); });
  for (v1::ArrayWait& wait : ordered) *outlook.add_reasons() = std::move(wait);
  if (next != nullptr) {
    outlook.set_next_task(next->name);
    Forecast forecast = scheduling_.Explain(next->id, std::nullopt, now);
    if (!forecast.start.has_value()) *outlook.mutable_next() = std::move(forecast.reason);
  }
  return outlook;
}

void CoreImpl::CheckArrays(std::vector<std::string>& broken) const {
  for (const auto& [id, array] : jobs_.arrays().all()) {
    const auto claim = [&, &id = id](bool holds, absl::string_view what) {
      if (!holds) broken.push_back(absl::StrCat("array ", id, ": ", what));
    };
    claim(array.max_running == 0 || array.admitted.size() <= static_cast<size_t>(array.max_running),
          "more tasks than max_running run or wait for devices");
    claim(array.waiting.empty() || array.admitted.size() == static_cast<size_t>(array.max_running),
          "tasks wait for their turn, though fewer than max_running run");
    for (const JobId& task : array.live) {
      const JobEntry* job = jobs_.Find(task);
      claim(job != nullptr && job->live(), "a task is live that has ended");
      if (job == nullptr) continue;
      claim(array.admitted.contains(task) == (job->has_attempt() || job->state.has_queued()),
            "a task is admitted if and only if it has entered its queue or runs");
    }
  }
}

}  // namespace muster::coordinator
