#include "coordinator/rpc/call_log.h"

#include <optional>

#include "absl/strings/str_format.h"
#include "base/trace_context.h"

namespace muster::coordinator {
namespace {

bool IsOwnError(absl::StatusCode code) {
  switch (code) {
    case absl::StatusCode::kInternal:
    case absl::StatusCode::kUnknown:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kUnimplemented:
    case absl::StatusCode::kResourceExhausted:
      return true;
    default:
      return false;
  }
}

}  // namespace

std::string CallLog::MakeTraceId() {
  MutexLock lock(&mutex_);
  const uint64_t high = rng_.Next();
  return absl::StrFormat("%016x%016x", high, rng_.Next() | 1);
}

void CallLog::Ended(const Call& call, absl::Time now) {
  const bool slow = call.took >= slow_;
  if (!slow && call.status.ok()) return;
  const bool own = IsOwnError(call.status.code());
  const LogLevel level = slow || own ? LogLevel::kWarning : LogLevel::kDebug;
  int64_t before = 0;
  if (level == LogLevel::kWarning) {
    const RateLimit::Answer answer = lines_.Take("", now);
    if (!answer.may) return;
    before = answer.refused_before;
  }
  const std::optional<TraceContext> given = ParseTraceparent(call.traceparent);
  const char* message = own ? "a call failed" : slow ? "a call was slow" : "a call was refused";
  log_.Write(level, message,
             {{"method", call.method},
              {"code", absl::StatusCodeToString(call.status.code())},
              {"seconds", absl::ToDoubleSeconds(call.took)},
              {"trace_id", given.has_value() ? given->trace_id : MakeTraceId()},
              {"parent_id", given.has_value() ? given->parent_id : ""},
              {"caller", call.address},
              {"error", call.status.message()},
              {"lines_left_out", before}});
}

}  // namespace muster::coordinator
