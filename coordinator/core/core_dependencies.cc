#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/core_impl.h"
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

}  // namespace

absl::StatusOr<std::vector<v1::Dependency>> CoreImpl::DependenciesOf(
    const v1::JobSpec& spec) const {
  std::vector<v1::Dependency> out;
  for (int i = 0; i < spec.after_size(); ++i) {
    const std::string path = absl::StrCat("after[", i, "]: ");
    const std::optional<spec::ParsedDependency> parsed = spec::ParseDependency(spec.after(i));
    if (!parsed.has_value()) {
      return absl::InvalidArgumentError(absl::StrCat(path, "not understood"));
    }
    if (const Array* array = FindArray(parsed->job); array != nullptr) {
      const auto on = DependencyOn(*array, parsed->condition);
      if (!on.ok()) {
        return absl::Status(on.status().code(), absl::StrCat(path, on.status().message()));
      }
      if (on->has_value()) out.push_back(**on);
      continue;
    }
    const absl::StatusOr<const JobEntry*> job = jobs_.Resolve(parsed->job);
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

v1::WaitReason CoreImpl::WaitFor(const v1::JobSpec& spec,
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

void CoreImpl::AwaitDependencies(JobEntry& job, Turn& turn) {
  for (const v1::Dependency& dependency : job.state.after()) {
    const JobId id(dependency.job_id());
    dependents_[id].insert(job.id());
    // Only a state that another version has written can name a job that has ended.
    if (dependency.array()) {
      const Array* array = jobs_.arrays().FindId(id.value());
      if (array == nullptr || array->live.empty()) ended_.push_back(id);
      continue;
    }
    const JobEntry* target = jobs_.Find(id);
    if (target == nullptr || !target->live()) ended_.push_back(id);
  }
  Explain(job, WaitFor(job.spec(), job.state.after()), turn);
}

void CoreImpl::ResolveDependents(Turn& turn) {
  while (!ended_.empty()) {
    const JobId id = ended_.back();
    ended_.pop_back();
    JobEntry* ended = jobs_.Find(id);
    if (ended != nullptr && !ended->state.after().empty()) {  // it was cancelled while it waited
      for (const v1::Dependency& dependency : ended->state.after()) {
        const auto others = dependents_.find(JobId(dependency.job_id()));
        if (others != dependents_.end()) others->second.erase(id);
      }
      ended->state.clear_after();
      turn.Persist(id);
    }
    if (ended != nullptr && ended->spec().has_array_task()) TaskEnded(*ended, turn);
    const auto waiting = dependents_.extract(id);
    if (waiting.empty()) continue;
    for (const JobId& dependent : waiting.mapped()) {
      if (JobEntry* job = jobs_.Find(dependent); job != nullptr && job->live()) {
        DependencyEnded(*job, id, ended, turn);
      }
    }
  }
}

void CoreImpl::DependencyEnded(JobEntry& job, const JobId& id, const JobEntry* ended, Turn& turn) {
  auto& after = *job.state.mutable_after();
  for (int i = after.size() - 1; i >= 0; --i) {
    if (after[i].job_id() != id.value()) continue;
    const bool holds = after[i].array()
                           ? BrokenBy(after[i]).empty()
                           : ended != nullptr && Holds(after[i].condition(), ended->state.state());
    if (!holds) {
      const std::string why =
          after[i].array()
              ? BrokenBy(after[i])
              : CannotHold(after[i], ended == nullptr ? "is not known any more" : EndedAs(*ended));
      job.state.set_message(why);
      Transition(job, JobEvent::kCannotStart, why, turn);
      return;
    }
    after.DeleteSubrange(i, 1);
  }
  turn.Persist(job.id());
  if (job.state.state() == v1::JOB_STATE_HELD) return;  // it waits on when it is released
  if (after.empty()) {
    job.queued_at = turn.now();
    Wait(job, turn);
  } else {
    Explain(job, WaitFor(job.spec(), after), turn);
  }
}

}  // namespace muster::coordinator
