#include "parallel/train/checkpoint_names.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {
namespace {
constexpr char kFamilyKey[] = "model.family";
constexpr absl::string_view kSizePrefix = "model.";
}  // namespace

void WriteDescription(const ModelDescription& description, CheckpointState& state) {
  state.texts[kFamilyKey] = description.family;
  for (const auto& [name, value] : description.sizes)
    state.integers[absl::StrCat(kSizePrefix, name)] = value;
}

ModelDescription ReadDescription(const CheckpointState& state) {
  ModelDescription description;
  if (const auto family = state.texts.find(kFamilyKey); family != state.texts.end()) {
    description.family = family->second;
  }
  for (const auto& [name, value] : state.integers) {
    if (absl::StartsWith(name, kSizePrefix))
      description.sizes[name.substr(kSizePrefix.size())] = value;
  }
  return description;
}

}  // namespace muster::parallel
