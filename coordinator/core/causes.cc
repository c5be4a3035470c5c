#include "coordinator/core/causes.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_replace.h"

namespace muster::coordinator {
namespace {

std::string WithoutPrefix(const std::string& name, size_t prefix) {
  if (name.size() < prefix) return "unknown";
  return absl::AsciiStrToLower(name.substr(prefix));
}

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

}  // namespace

Budget BudgetOf(v1::Cause cause, bool trained) {
  switch (cause) {
    case v1::CAUSE_USER_ERROR:
    case v1::CAUSE_DATA:
    case v1::CAUSE_NUMERIC:
      return Budget::kNotRetried;
    case v1::CAUSE_STORAGE:
    case v1::CAUSE_OUT_OF_MEMORY:
      return trained ? Budget::kCounted : Budget::kNotRetried;
    case v1::CAUSE_WORKER_LOST:
    case v1::CAUSE_NETWORK:
    case v1::CAUSE_PREEMPTED:
    case v1::CAUSE_RESIZED:
    case v1::CAUSE_LAUNCH:
    case v1::CAUSE_COORDINATOR:
    case v1::CAUSE_CANCELLED:
    case v1::CAUSE_COMPLETED:
      return Budget::kFree;
    default:
      return Budget::kCounted;
  }
}

absl::Duration BackoffBefore(const v1::BackoffSpec& spec, v1::Cause cause, int restarts_in_a_row) {
  if (cause == v1::CAUSE_PREEMPTED || cause == v1::CAUSE_RESIZED) return absl::ZeroDuration();
  const absl::Duration limit = FromProto(spec.max());
  absl::Duration wait = FromProto(spec.initial());
  for (int i = 1; i < restarts_in_a_row && wait < limit && wait > absl::ZeroDuration(); ++i) {
    wait *= 2;
  }
  return std::min(wait, limit);
}

std::string CauseName(v1::Cause cause) {
  return absl::StrReplaceAll(WithoutPrefix(v1::Cause_Name(cause), sizeof("CAUSE_") - 1),
                             {{"_", " "}});
}

std::string StateName(v1::JobState state) {
  return WithoutPrefix(v1::JobState_Name(state), sizeof("JOB_STATE_") - 1);
}

std::string StateName(v1::AttemptState state) {
  return WithoutPrefix(v1::AttemptState_Name(state), sizeof("ATTEMPT_STATE_") - 1);
}

}  // namespace muster::coordinator
