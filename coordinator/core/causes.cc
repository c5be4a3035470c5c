#include "coordinator/core/causes.h"

#include <algorithm>

#include "absl/strings/str_replace.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {

Budget BudgetOf(v1::Cause cause, bool trained) {
  switch (cause) {
    case v1::CAUSE_USER_ERROR:
    case v1::CAUSE_DATA:
    case v1::CAUSE_NUMERIC:
    case v1::CAUSE_TIME_LIMIT:
    case v1::CAUSE_DEADLINE:
      return Budget::kNotRetried;
    case v1::CAUSE_STORAGE:
    case v1::CAUSE_OUT_OF_MEMORY:
      return trained ? Budget::kCounted : Budget::kNotRetried;
    case v1::CAUSE_WORKER_LOST:
    case v1::CAUSE_NETWORK:
    case v1::CAUSE_PREEMPTED:
    case v1::CAUSE_RESIZED:
    case v1::CAUSE_MAINTENANCE:
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
  if (cause == v1::CAUSE_PREEMPTED || cause == v1::CAUSE_RESIZED ||
      cause == v1::CAUSE_MAINTENANCE) {
    return absl::ZeroDuration();
  }
  const absl::Duration limit = FromProto(spec.max());
  absl::Duration wait = FromProto(spec.initial());
  for (int i = 1; i < restarts_in_a_row && wait < limit && wait > absl::ZeroDuration(); ++i) {
    wait *= 2;
  }
  return std::min(wait, limit);
}

std::string CauseText(v1::Cause cause) {
  return absl::StrReplaceAll(spec::EnumName(cause), {{"_", " "}});
}

}  // namespace muster::coordinator
