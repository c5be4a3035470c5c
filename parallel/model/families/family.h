// What sets one family of models apart. A family of language models is one object that says how a
// description becomes a configuration, and what its models are called at Hugging Face. From the
// configuration follow the model, its parameters, FLOPs, memory, split units, costs of blocks and
// traffic (language_model.h, language_model_sizes.h, layer_kind.h, parallel/train): nothing else of
// the engine knows a family. What a job spec says of a family, without the engine, is its
// counterpart in proto/spec/families. docs/decisions/0027-one-object-per-family.md has what adding
// a family touches.
#ifndef MUSTER_PARALLEL_MODEL_FAMILIES_FAMILY_H_
#define MUSTER_PARALLEL_MODEL_FAMILIES_FAMILY_H_

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

struct HuggingFaceFamily;  // hugging_face.h

struct ModelFamily {
  const char* name;  // ModelDescription::family
  // kInvalidArgument names the size, number, flag or text that is missing, unknown or impossible.
  absl::StatusOr<LanguageModelConfig> (*config)(const ModelDescription& description);
  // Null: its models have no counterpart there.
  const HuggingFaceFamily* hugging_face = nullptr;
};

// The families of this program. Defined alone in list.cc, so that a program may bring its own list,
// as a test does.
absl::Span<const ModelFamily* const> Families();
// Null for an unknown name.
const ModelFamily* FindFamily(absl::string_view name);

// The configuration that a description stands for. kInvalidArgument names the unknown family, or
// what is wrong with the description.
absl::StatusOr<LanguageModelConfig> FindConfig(const ModelDescription& description);
// Requires: a description that MakeModel takes.
LanguageModelConfig ConfigOf(const ModelDescription& description);

// MakeModel of a description of this family, which need not be one of Families().
absl::StatusOr<std::unique_ptr<Model>> MakeModel(const ModelFamily& family,
                                                 const ModelDescription& description,
                                                 const ModelParallel& parallel = {});
// MakeModel of a model with one block of each kind alone, in the order of KindsOfBlocks, for those
// that measure blocks. Its description is that of the whole model.
absl::StatusOr<std::unique_ptr<Model>> MakeModelOfKinds(const ModelDescription& description,
                                                        const ModelParallel& parallel);

// A size of a description that MakeModel takes.
int64_t SizeOf(const ModelDescription& description, const std::string& name);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILIES_FAMILY_H_
