#include "coordinator/core/arrays.h"

#include <utility>

namespace muster::coordinator {

Array* ArrayTable::Of(const JobEntry& job) {
  if (!job.spec().has_array_task()) return nullptr;
  const auto found = arrays_.find(job.spec().array_task().array_id());
  return found == arrays_.end() ? nullptr : &found->second;
}

void ArrayTable::Add(const JobEntry& job) {
  if (!job.spec().has_array_task()) return;
  const v1::ArrayTask& task = job.spec().array_task();
  Array& array = arrays_[task.array_id()];
  if (array.jobs.empty()) {
    array.name = task.array();
    array.id = task.array_id();
    array.tasks = task.tasks();
    array.max_running = task.max_running();
    array.sequence = job.fixed.submit_sequence();
    by_name_[array.name][array.sequence] = array.id;
  }
  array.jobs[task.index()] = job.id();
  if (job.live()) {
    array.live.insert(job.id());
    if (job.has_attempt() || job.state.has_queued()) array.admitted.insert(job.id());
  } else if (job.state.state() != v1::JOB_STATE_SUCCEEDED) {
    array.task_failed = true;
  }
}

bool ArrayTable::Admit(const JobEntry& job) {
  Array* array = Of(job);
  if (array == nullptr || array->admitted.contains(job.id())) return true;
  const int32_t index = job.spec().array_task().index();
  if (array->max_running > 0 && array->admitted.size() >= static_cast<size_t>(array->max_running)) {
    array->waiting[index] = job.id();
    return false;
  }
  array->waiting.erase(index);
  array->admitted.insert(job.id());
  return true;
}

void ArrayTable::Leave(const JobEntry& job) {
  Array* array = Of(job);
  if (array == nullptr) return;
  array->waiting.erase(job.spec().array_task().index());
  if (array->admitted.erase(job.id()) > 0) left_.insert(array->id);
}

void ArrayTable::Ended(const JobEntry& job) {
  Array* array = Of(job);
  if (array == nullptr) return;
  Leave(job);
  array->live.erase(job.id());
  if (job.state.state() != v1::JOB_STATE_SUCCEEDED) array->task_failed = true;
}

void ArrayTable::Forget(const JobEntry& job) {
  Array* array = Of(job);
  if (array == nullptr) return;
  array->jobs.erase(job.spec().array_task().index());
  if (!array->jobs.empty()) return;
  const auto named = by_name_.find(array->name);
  named->second.erase(array->sequence);
  if (named->second.empty()) by_name_.erase(named);
  left_.erase(array->id);
  arrays_.erase(std::string(array->id));
}

std::vector<JobId> ArrayTable::TakeNext() {
  std::vector<JobId> next;
  for (const std::string& id : std::exchange(left_, {})) {
    const auto found = arrays_.find(id);
    if (found == arrays_.end()) continue;
    Array& array = found->second;
    while (!array.waiting.empty() &&
           array.admitted.size() < static_cast<size_t>(array.max_running)) {
      next.push_back(array.waiting.begin()->second);
      array.admitted.insert(next.back());
      array.waiting.erase(array.waiting.begin());
    }
  }
  return next;
}

bool ArrayTable::Waits(const JobEntry& job) const {
  if (!job.spec().has_array_task()) return false;
  const Array* array = FindId(job.spec().array_task().array_id());
  return array != nullptr && array->waiting.contains(job.spec().array_task().index());
}

const Array* ArrayTable::FindId(const std::string& id) const {
  const auto found = arrays_.find(id);
  return found == arrays_.end() ? nullptr : &found->second;
}

const Array* ArrayTable::FindName(const std::string& name) const {
  const auto named = by_name_.find(name);
  return named == by_name_.end() ? nullptr : FindId(named->second.rbegin()->second);
}

v1::ArrayReport ReportOf(const Array& array) {
  v1::ArrayReport report;
  report.set_array(array.name);
  report.set_array_id(array.id);
  report.set_tasks(array.tasks);
  return report;
}

}  // namespace muster::coordinator
