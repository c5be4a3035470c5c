// The rules of ArrayTask, which the coordinator checks as well.
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "proto/spec/array.h"
#include "proto/spec/checker.h"
#include "proto/spec/names.h"

namespace muster::spec {

bool IsArrayKey(const std::string& key) {
  constexpr size_t kKeyBytesMax = 63;
  if (key.empty() || key.size() > kKeyBytesMax || !absl::ascii_islower(key[0])) return false;
  for (const char c : key) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '_') return false;
  }
  return true;
}

void CheckArrayTask(const v1::JobSpec& spec, Checker& check) {
  const v1::ArrayTask& task = spec.array_task();
  check.InRange("array_task.tasks", task.tasks(), 1, kArrayTasksMax);
  if (task.index() < 0 || task.index() >= task.tasks()) {
    check.Add("array_task.index", task.index(), " is not in 0 to tasks - 1 (",
              int64_t{task.tasks()} - 1, ")");
  }
  check.NotNegative("array_task.max_running", static_cast<int64_t>(task.max_running()));
  if (spec.name() != absl::StrCat(task.array(), "-", task.index())) {
    check.Add("name", Quoted(spec.name()), " is not that of task ", task.index(), " of array ",
              Quoted(task.array()));
  }
  const auto label = [&spec](const char* name) {
    const auto found = spec.labels().find(name);
    return found == spec.labels().end() ? std::string() : found->second;
  };
  if (label(kArrayLabel) != task.array() || label(kArrayIndexLabel) != absl::StrCat(task.index())) {
    check.Add("labels", "a task of an array has the labels ", kArrayLabel, " and ",
              kArrayIndexLabel, " with the array's name and its index");
  }
  if (task.values_size() > kArrayKeysMax) {
    check.Add("array_task.values", task.values_size(), " keys; at most ", kArrayKeysMax);
    return;
  }
  std::set<std::string> seen;
  for (const v1::ArrayValue& value : task.values()) {
    if (!IsArrayKey(value.key()) || value.key() == "index") {
      check.Add("array_task.values", Quoted(value.key()), " is not a key");
    } else if (!seen.insert(value.key()).second) {
      check.Add("array_task.values", Quoted(value.key()), " is given twice");
    } else if (value.value().size() > kArrayValueBytesMax) {
      check.Add("array_task.values", "the value of ", value.key(), " is longer than ",
                kArrayValueBytesMax, " bytes");
    } else if (value.value().find('\0') != std::string::npos) {
      check.Add("array_task.values", "the value of ", value.key(), " contains a zero byte");
    }
  }
}

absl::Status ValidateArray(const google::protobuf::RepeatedPtrField<v1::JobSpec>& tasks) {
  if (tasks.empty() || tasks.size() > kArrayTasksMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("tasks: ", tasks.size(), "; an array has 1 to ", kArrayTasksMax));
  }
  const v1::ArrayTask& first = tasks[0].array_task();
  for (int32_t i = 0; i < tasks.size(); ++i) {
    const v1::ArrayTask& task = tasks[i].array_task();
    const auto refuse = [i](const auto&... why) {
      return absl::InvalidArgumentError(absl::StrCat("task ", i, ": array_task.", why...));
    };
    if (!tasks[i].has_array_task()) return refuse("array: required for a task of an array");
    if (!task.array_id().empty()) return refuse("array_id: the coordinator sets it; leave it out");
    if (task.array() != first.array()) {
      return refuse("array: ", Quoted(task.array()), " is not that of task 0, ",
                    Quoted(first.array()));
    }
    if (task.index() != i) return refuse("index: ", task.index(), " is not ", i);
    if (task.tasks() != tasks.size()) {
      return refuse("tasks: ", task.tasks(), " is not the number of tasks, ", tasks.size());
    }
    if (task.max_running() != first.max_running()) {
      return refuse("max_running: ", task.max_running(), " is not that of task 0, ",
                    first.max_running());
    }
  }
  return absl::OkStatus();
}

}  // namespace muster::spec
