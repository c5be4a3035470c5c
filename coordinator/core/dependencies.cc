#include "coordinator/core/dependencies.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/job_state.h"
#include "proto/spec/dependencies.h"
#include "proto/spec/names.h"

namespace muster::coordinator {
namespace {

bool Holds(v1::EndCondition condition, v1::JobState end) {
  switch (condition) {
    case v1::END_CONDITION_SUCCEEDED:
      return end == v1::JOB_STATE_SUCCEEDED;
    case v1::END_CONDITION_FAILED:
      return end == v1::JOB_STATE_FAILED || end == v1::JOB_STATE_CANCELLED;
    default:
      return true;
  }
}

// "it was to start after prepare (prepare-x7k2p) has succeeded, which has failed".
std::string CannotHold(const v1::Dependency& dependency, const std::string& how) {
  return absl::StrCat("it was to start after ", dependency.job_name(), " (", dependency.job_id(),
                      ") has ", spec::EnumName(dependency.condition()), ", which ", how);
}

std::string EndedAs(const JobEntry& job) {
  const v1::JobState state = job.state.state();
  return absl::StrCat(state == v1::JOB_STATE_CANCELLED ? "was " : "has ", spec::EnumName(state));
}

// Takes the end of job `id` out of the dependencies of `job`; `ended` is null when nothing is known
// of it any more. Nothing: the job is held.
std::optional<Dependents::Change> EndOf(const JobId& id, const JobEntry* ended, JobEntry& job) {
  using Kind = Dependents::Change::Kind;
  auto& after = *job.state.mutable_after();
  for (int i = after.size() - 1; i >= 0; --i) {
    if (after[i].job_id() != id.value()) continue;
    if (ended == nullptr || !Holds(after[i].condition(), ended->state.state())) {
      return Dependents::Change{
          job.id(), Kind::kCannotStart,
          CannotHold(after[i], ended == nullptr ? "is not known any more" : EndedAs(*ended))};
    }
    after.DeleteSubrange(i, 1);
  }
  if (job.state.state() == v1::JOB_STATE_HELD) return std::nullopt;
  return Dependents::Change{job.id(), after.empty() ? Kind::kIsFree : Kind::kWaitsOn, ""};
}

}  // namespace

absl::StatusOr<std::vector<v1::Dependency>> DependenciesOf(const v1::JobSpec& spec,
                                                           const JobTable& jobs) {
  std::vector<v1::Dependency> out;
  for (int i = 0; i < spec.after_size(); ++i) {
    const std::string path = absl::StrCat("after[", i, "]: ");
    const std::optional<spec::ParsedDependency> parsed = spec::ParseDependency(spec.after(i));
    if (!parsed.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(path, "not understood"));
    }
    const absl::StatusOr<const JobEntry*> job = jobs.Resolve(parsed->job);
    if (!job.ok()) {
      return absl::Status(job.status().code(), absl::StrCat(path, job.status().message()));
    }
    v1::Dependency dependency;
    dependency.set_job_id((*job)->fixed.id());
    dependency.set_job_name((*job)->name());
    dependency.set_condition(parsed->condition);
    if (!(*job)->live()) {
      if (Holds(parsed->condition, (*job)->state.state())) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(path, CannotHold(dependency, EndedAs(**job))));
    }
    out.push_back(std::move(dependency));
  }
  return out;
}

v1::WaitReason WaitFor(const v1::JobSpec& spec,
                       const google::protobuf::RepeatedPtrField<v1::Dependency>& after) {
  v1::WaitReason reason;
  reason.set_code(v1::WAIT_CODE_AFTER);
  reason.set_queue(spec.queue());
  reason.set_ranks(spec.resources().has_rank_range() ? spec.resources().rank_range().min()
                                                     : spec.resources().ranks());
  reason.set_device(spec.resources().device());
  reason.set_group(1);
  *reason.mutable_after() = after;
  return reason;
}

void Dependents::Await(const JobEntry& job, const JobTable& jobs) {
  for (const v1::Dependency& dependency : job.state.after()) {
    const JobId id(dependency.job_id());
    waiting_[id].insert(job.id());
    // Only a state that another version has written can name a job that has ended.
    const JobEntry* target = jobs.Find(id);
    if (target == nullptr || !target->live()) ended_.push_back(id);
  }
}

std::vector<Dependents::Change> Dependents::TakeNext(JobTable& jobs, Turn& turn) {
  const JobId id = ended_.back();
  ended_.pop_back();
  JobEntry* ended = jobs.Find(id);
  if (ended != nullptr && !ended->state.after().empty()) {  // it was cancelled while it waited
    for (const v1::Dependency& dependency : ended->state.after()) {
      const auto others = waiting_.find(JobId(dependency.job_id()));
      if (others != waiting_.end()) others->second.erase(id);
    }
    ended->state.clear_after();
    turn.Persist(id);
  }
  std::vector<Change> changes;
  const auto dependents = waiting_.extract(id);
  if (dependents.empty()) return changes;
  for (const JobId& dependent : dependents.mapped()) {
    JobEntry* job = jobs.Find(dependent);
    if (job == nullptr || !job->live()) continue;
    std::optional<Change> change = EndOf(id, ended, *job);
    turn.Persist(dependent);
    if (change.has_value()) changes.push_back(*std::move(change));
  }
  return changes;
}

}  // namespace muster::coordinator
