#include "parallel/train/checkpoint_names.h"

#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace muster::parallel {
namespace {
constexpr char kFamilyKey[] = "model.family";
// Prefixes of the names of sizes, numbers and flags.
constexpr absl::string_view kPrefix = "model.";
constexpr absl::string_view kFlagPrefix = "model.flag.";
constexpr absl::string_view kTextPrefix = "model.text.";
}  // namespace

std::string StateName(int state, const std::string& parameter) {
  switch (state) {
    case 0:
      return parameter;
    case 1:
      return kFirstMomentPrefix + parameter;
    default:
      return kSecondMomentPrefix + parameter;
  }
}

std::string ResidualName(int state, const std::string& parameter) {
  return (state == 0 ? kResidualPrefix : kResidualMomentumPrefix) + parameter;
}

std::vector<int64_t> PerRank(std::vector<int64_t> shape, int64_t ranks) {
  shape.insert(shape.begin(), ranks);
  return shape;
}

Box OfRank(Box box, int64_t rank) {
  box.offset.insert(box.offset.begin(), rank);
  box.extent.insert(box.extent.begin(), 1);
  return box;
}

void WriteDescription(const ModelDescription& description, CheckpointState& state) {
  state.texts[kFamilyKey] = description.family;
  for (const auto& [name, value] : description.texts) {
    state.texts[absl::StrCat(kTextPrefix, name)] = value;
  }
  for (const auto& [name, value] : description.sizes) {
    state.integers[absl::StrCat(kPrefix, name)] = value;
  }
  for (const auto& [name, value] : description.numbers) {
    state.numbers[absl::StrCat(kPrefix, name)] = value;
  }
  for (const auto& [name, value] : description.flags) {
    state.integers[absl::StrCat(kFlagPrefix, name)] = value ? 1 : 0;
  }
}

ModelDescription ReadDescription(const CheckpointState& state) {
  ModelDescription description;
  if (const auto family = state.texts.find(kFamilyKey); family != state.texts.end()) {
    description.family = family->second;
  }
  for (const auto& [name, value] : state.texts) {
    if (absl::StartsWith(name, kTextPrefix)) {
      description.texts[name.substr(kTextPrefix.size())] = value;
    }
  }
  for (const auto& [name, value] : state.integers) {
    if (absl::StartsWith(name, kFlagPrefix)) {
      description.flags[name.substr(kFlagPrefix.size())] = value != 0;
    } else if (absl::StartsWith(name, kPrefix)) {
      description.sizes[name.substr(kPrefix.size())] = value;
    }
  }
  for (const auto& [name, value] : state.numbers) {
    if (absl::StartsWith(name, kPrefix)) description.numbers[name.substr(kPrefix.size())] = value;
  }
  return description;
}

}  // namespace muster::parallel
