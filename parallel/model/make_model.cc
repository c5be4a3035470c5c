#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/gpt2.h"
#include "parallel/model/model.h"

namespace muster::parallel {
namespace {

// Fills in the sizes that a family wants, and insists on exactly those.
absl::Status ReadSizes(const ModelDescription& description,
                       std::vector<std::pair<std::string, int64_t*>> wanted) {
  for (const auto& [name, target] : wanted) {
    const auto found = description.sizes.find(name);
    if (found == description.sizes.end() || found->second <= 0) {
      return absl::InvalidArgumentError(absl::StrCat("model ", description.family, ": size '", name,
                                                     "' is missing or not positive"));
    }
    *target = found->second;
  }
  for (const auto& [name, value] : description.sizes) {
    bool known = false;
    for (const auto& [known_name, target] : wanted) known = known || known_name == name;
    if (!known) {
      return absl::InvalidArgumentError(
          absl::StrCat("model ", description.family, ": unknown size '", name, "'"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckParts(const ModelParallel& parallel, int64_t blocks) {
  for (const BlockRange& part : parallel.parts) {
    const int64_t end = part.end < 0 ? blocks : part.end;
    if (part.begin < 0 || part.begin >= end || end > blocks) {
      return absl::InvalidArgumentError(absl::StrCat("blocks ", part.begin, " to ", end,
                                                     " (embedding and head counted) are no "
                                                     "part of a model of ",
                                                     blocks, " blocks"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelDescription& description,
                                                 const ModelParallel& parallel) {
  if (description.family != "gpt2") {
    return absl::InvalidArgumentError(
        absl::StrCat("unknown model family '", description.family, "'; known: gpt2"));
  }
  Gpt2Config config;
  if (absl::Status status = ReadSizes(description, {{"layers", &config.layers},
                                                    {"hidden", &config.hidden},
                                                    {"heads", &config.heads},
                                                    {"vocab", &config.vocab},
                                                    {"sequence_length", &config.sequence_length}});
      !status.ok()) {
    return status;
  }
  if (config.hidden % config.heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "model gpt2: heads (", config.heads, ") does not divide hidden (", config.hidden, ")"));
  }
  RETURN_IF_ERROR(CheckParts(parallel, config.layers + 2));
  return MakeGpt2(config, parallel);
}

}  // namespace muster::parallel
