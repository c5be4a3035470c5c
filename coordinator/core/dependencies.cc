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

// Of an array that has ended, or of which a task has failed: why it cannot hold; empty: it holds.
std::string BrokenBy(const v1::Dependency& dependency) {
  const std::string start =
      absl::StrCat("it was to start after array ", dependency.job_name(), " (", dependency.job_id(),
                   ") has ", spec::EnumName(dependency.condition()), ", ");
  if (dependency.condition() == v1::END_CONDITION_SUCCEEDED && dependency.task_failed()) {
    return start + "of which a task has failed or was cancelled";
  }
  if (dependency.condition() == v1::END_CONDITION_FAILED && !dependency.task_failed()) {
    return start + "of which all tasks have succeeded";
  }
  return "";
}

// Nothing: it holds already. kFailedPrecondition: it cannot hold any more.
absl::StatusOr<std::optional<v1::Dependency>> DependencyOn(const Array& array,
                                                           v1::EndCondition condition) {
  v1::Dependency dependency;
  dependency.set_job_id(array.id);
  dependency.set_job_name(array.name);
  dependency.set_condition(condition);
  dependency.set_array(true);
  dependency.set_task_failed(array.task_failed);
  const bool ended = array.live.empty();
  if (ended || (array.task_failed && condition == v1::END_CONDITION_SUCCEEDED)) {
    const std::string broken = BrokenBy(dependency);
    if (!broken.empty()) return absl::FailedPreconditionError(broken);
    return std::optional<v1::Dependency>();
  }
  return std::optional<v1::Dependency>(std::move(dependency));
}

// Takes the end of job or array `id` out of the dependencies of `job`; `ended` is null when nothing
// is known of it any more. Nothing: the job is held.
std::optional<Dependents::Change> EndOf(const JobId& id, const JobEntry* ended, JobEntry& job) {
  using Kind = Dependents::Change::Kind;
  auto& after = *job.state.mutable_after();
  for (int i = after.size() - 1; i >= 0; --i) {
    if (after[i].job_id() != id.value()) continue;
    if (after[i].array()) {
      std::string broken = BrokenBy(after[i]);
      if (!broken.empty()) return Dependents::Change{job.id(), Kind::kCannotStart, broken};
    } else if (ended == nullptr || !Holds(after[i].condition(), ended->state.state())) {
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
    if (const Array* array = jobs.FindArray(parsed->job); array != nullptr) {
      const auto on = DependencyOn(*array, parsed->condition);
      if (!on.ok()) {
        return absl::Status(on.status().code(), absl::StrCat(path, on.status().message()));
      }
      if (on->has_value()) out.push_back(**on);
      continue;
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
    if (dependency.array()) {
      const Array* array = jobs.arrays().FindId(id.value());
      if (array == nullptr || array->live.empty()) ended_.push_back(id);
      continue;
    }
    const JobEntry* target = jobs.Find(id);
    if (target == nullptr || !target->live()) ended_.push_back(id);
  }
}

std::vector<Dependents::Change> Dependents::TaskEnded(const JobEntry& task, JobTable& jobs,
                                                      Turn& turn) {
  std::vector<Change> changes;
  const Array* array = jobs.arrays().FindId(task.spec().array_task().array_id());
  if (array == nullptr) return changes;
  const JobId id(array->id);
  const auto dependents = waiting_.find(id);
  if (dependents == waiting_.end()) return changes;
  for (const JobId& dependent : dependents->second) {
    JobEntry* job = jobs.Find(dependent);
    if (job == nullptr || !job->live() || !array->task_failed) continue;
    std::string broken;
    for (v1::Dependency& dependency : *job->state.mutable_after()) {
      if (dependency.job_id() != id.value() || dependency.task_failed()) continue;
      dependency.set_task_failed(true);
      turn.Persist(dependent);
      if (dependency.condition() == v1::END_CONDITION_SUCCEEDED) broken = BrokenBy(dependency);
    }
    if (!broken.empty()) changes.push_back({dependent, Change::Kind::kCannotStart, broken});
  }
  if (array->live.empty()) ended_.push_back(id);
  return changes;
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
  if (ended != nullptr && ended->spec().has_array_task()) {
    changes = TaskEnded(*ended, jobs, turn);
  }
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
