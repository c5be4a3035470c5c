#include "proto/spec/dependencies.h"

#include "absl/strings/ascii.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

constexpr size_t kJobBytesMax = 253;

// A name or an id: both are of these characters.
bool CanBeJob(const std::string& text) {
  if (text.empty() || text.size() > kJobBytesMax) return false;
  for (const char c : text) {
    if (!absl::ascii_islower(c) && !absl::ascii_isdigit(c) && c != '-') return false;
  }
  return true;
}

}  // namespace

std::optional<ParsedDependency> ParseDependency(const std::string& text) {
  const size_t colon = text.find(':');
  if (colon == std::string::npos) return std::nullopt;
  const auto* condition = FindEnumValue(*v1::EndCondition_descriptor(), text.substr(colon + 1));
  ParsedDependency parsed{text.substr(0, colon), v1::END_CONDITION_UNSPECIFIED};
  if (condition == nullptr || !CanBeJob(parsed.job)) return std::nullopt;
  parsed.condition = static_cast<v1::EndCondition>(condition->number());
  if (parsed.condition == v1::END_CONDITION_UNSPECIFIED) return std::nullopt;
  return parsed;
}

}  // namespace muster::spec
