#include "base/trace_context.h"

namespace muster {
namespace {

constexpr size_t kTraceAt = 3;
constexpr size_t kTraceDigits = 32;
constexpr size_t kParentAt = kTraceAt + kTraceDigits + 1;
constexpr size_t kParentDigits = 16;
constexpr size_t kFlagsAt = kParentAt + kParentDigits + 1;
constexpr size_t kBytes = kFlagsAt + 2;

bool IsHex(absl::string_view text) {
  return text.find_first_not_of("0123456789abcdef") == absl::string_view::npos;
}
bool IsId(absl::string_view text) {
  return IsHex(text) && text.find_first_not_of('0') != absl::string_view::npos;
}

}  // namespace

std::optional<TraceContext> ParseTraceparent(absl::string_view text) {
  if (text.size() < kBytes) return std::nullopt;
  const absl::string_view version = text.substr(0, kTraceAt - 1);
  const absl::string_view trace = text.substr(kTraceAt, kTraceDigits);
  const absl::string_view parent = text.substr(kParentAt, kParentDigits);
  if (!IsHex(version) || version == "ff" || !IsId(trace) || !IsId(parent) ||
      !IsHex(text.substr(kFlagsAt, 2)) || text[kTraceAt - 1] != '-' || text[kParentAt - 1] != '-' ||
      text[kFlagsAt - 1] != '-') {
    return std::nullopt;
  }
  if (text.size() > kBytes && (version == "00" || text[kBytes] != '-')) return std::nullopt;
  return TraceContext{std::string(trace), std::string(parent)};
}

}  // namespace muster
