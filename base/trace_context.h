// The W3C's Trace Context (https://www.w3.org/TR/trace-context): what a caller's `traceparent`
// says.
#ifndef MUSTER_BASE_TRACE_CONTEXT_H_
#define MUSTER_BASE_TRACE_CONTEXT_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace muster {

struct TraceContext {
  std::string trace_id;   // 32 hex digits, not all 0
  std::string parent_id;  // 16: the caller's span
};

// Of VERSION-TRACEID-PARENTID-FLAGS in lower-case hex digits; later versions may say more behind
// them. No value: it is none, and counts as if it were not there.
std::optional<TraceContext> ParseTraceparent(absl::string_view text);

}  // namespace muster

#endif  // MUSTER_BASE_TRACE_CONTEXT_H_
