#include "coordinator/core/explainer.h"

#include <algorithm>
#include <map>
#include <optional>
#include <utility>

#include "base/status_macros.h"
#include "coordinator/core/dependencies.h"
#include "coordinator/core/planned_job.h"
#include "coordinator/scheduler/placement.h"
#include "proto/spec/deadline.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

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

// Of a live job with a deadline; `waiting` says why it waits, null: it runs, or would start now.
std::optional<v1::DeadlineOutlook> DeadlineOutlookOf(const JobEntry& job,
                                                     const v1::WaitReason* waiting,
                                                     absl::Time now) {
  const absl::Time deadline = spec::DeadlineOf(job.spec());
  if (deadline == absl::InfiniteFuture() || !job.live()) return std::nullopt;
  v1::DeadlineOutlook outlook;
  *outlook.mutable_deadline() = ToProto(deadline);
  absl::Time start = now;
  outlook.set_start_known(waiting == nullptr || waiting->has_estimated_start());
  if (waiting != nullptr && waiting->has_estimated_start()) {
    start = std::max(now, FromProto(waiting->estimated_start()));
  }
  const absl::Duration rest = RestOf(job);
  const absl::Duration limit = LimitOf(job, now);
  outlook.set_by_time_limit(limit < rest);
  if (std::min(rest, limit) != absl::InfiniteDuration()) {
    *outlook.mutable_expected_end() = ToProto(start + std::min(rest, limit));
  }
  return outlook;
}

}  // namespace

absl::StatusOr<Explained> Explainer::Explain(const ExplainQuery& about, absl::Time now) {
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
    out.deadline = DeadlineOutlookOf(*job, waiting, now);
  } else {
    JobEntry entry;
    *entry.fixed.mutable_spec() = out.job.spec();
    out.deadline = DeadlineOutlookOf(entry, waiting, now);
  }
  return out;
}

absl::StatusOr<Explained> Explainer::ExplainWait(const ExplainQuery& about, absl::Time now) {
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
    added = AsWaiting(entry, reservations_);
  }
  Forecast forecast = scheduling_.Explain(id, std::move(added), now);
  if (!forecast.start.has_value()) {
    out.waiting = std::move(forecast.reason);
  } else if (std::holds_alternative<v1::JobSpec>(about)) {
    out.waiting.reset();
    out.placements = std::move(forecast.start->placements);
    JobEntry entry;
    *entry.fixed.mutable_spec() = std::get<v1::JobSpec>(about);
    WaitingJob placed = AsWaiting(entry, reservations_);
    if (entry.elastic()) placed = AtSize(placed, static_cast<int32_t>(out.placements.size()));
    *out.job.mutable_placement_cost() = CostOf(workers_.slots(), placed, out.placements);
    for (v1::Placement& placement : out.placements) {
      placement.set_host(workers_.Find(WorkerId(placement.worker()))->row.host());
    }
  }
  return out;
}

v1::ArrayOutlook Explainer::OutlookOf(const Array& array, absl::Time now) {
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

}  // namespace muster::coordinator
