// What sets one family of models apart: how its description becomes the configuration of a language
// model, from which everything else follows (language_model_sizes.h). A family is one file that
// defines a ModelFamily, its line in Families(), its layout in parallel/interop, and its rules in
// proto/spec/families.
#ifndef MUSTER_PARALLEL_MODEL_FAMILY_H_
#define MUSTER_PARALLEL_MODEL_FAMILY_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "parallel/model/language_model.h"
#include "parallel/model/model.h"

namespace muster::parallel {

struct ModelFamily {
  const char* name;  // ModelDescription::family
  // kInvalidArgument names the size, number, flag or text that is missing, unknown or impossible.
  absl::StatusOr<LanguageModelConfig> (*config)(const ModelDescription& description);
};

extern const ModelFamily kGpt2Family, kLlamaFamily, kMamba2Family, kHybridFamily;

absl::Span<const ModelFamily* const> Families();
// Null for an unknown name.
const ModelFamily* FindFamily(absl::string_view name);
// Requires: a description that MakeModel takes.
LanguageModelConfig ConfigOf(const ModelDescription& description);

// MakeModel of a description of this family, which need not be one of Families().
absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelFamily& family,
                                                 const ModelDescription& description,
                                                 const ModelParallel& parallel = {});

// A size of a description that MakeModel takes.
int64_t SizeOf(const ModelDescription& description, const std::string& name);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILY_H_
