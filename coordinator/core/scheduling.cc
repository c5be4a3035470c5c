#include "coordinator/core/scheduling.h"

#include <variant>

namespace muster::coordinator {

bool Scheduling::Add(WaitingJob job) {
  const bool matters =
      !horizon_.Excludes(job) || job.not_before != absl::InfinitePast();  // a plan wakes at its end
  waiting_.Add(std::move(job));
  return matters;
}

bool Scheduling::Remove(const JobId& id) {
  const WaitingJob* job = waiting_.Find(id);
  if (job == nullptr) return false;
  const bool matters = !horizon_.Excludes(*job);
  waiting_.Remove(id);
  return matters;
}

Schedule Scheduling::MakePlan(absl::Time now) {
  Schedule plan = Plan(Cluster(), waiting_, policy_, now);
  horizon_ = plan.horizon;
  std::set<JobId> explained;
  for (const Explanation& explanation : plan.explanations) explained.insert(explanation.job);
  std::set<JobId> started;
  for (const Decision& decision : plan.decisions) {
    if (const Start* start = std::get_if<Start>(&decision)) started.insert(start->job);
  }
  for (const JobId& id : explained_) {
    const WaitingJob* job = waiting_.Find(id);
    if (job == nullptr || explained.contains(id) || started.contains(id)) continue;
    plan.explanations.push_back({id, BehindMany(*job, policy_)});
  }
  explained_ = std::move(explained);
  return plan;
}

Forecast Scheduling::Explain(const JobId& id, std::optional<WaitingJob> added, absl::Time now) {
  if (!added.has_value()) {
    return muster::coordinator::Explain(Cluster(), waiting_, policy_, now, id);
  }
  WaitingQueue with = waiting_;
  with.Add(*std::move(added));
  return muster::coordinator::Explain(Cluster(), with, policy_, now, id);
}

}  // namespace muster::coordinator
