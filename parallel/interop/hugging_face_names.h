// Maps the parameters of Muster's models to the tensors and config.json of a Hugging Face model
// folder, as the documentation and checkpoints of transformers' GPT2LMHeadModel,
// LlamaForCausalLM, Mamba2ForCausalLM and NemotronHForCausalLM define them. Each family has its map
// in parallel/model/families. Pure: no files.
#ifndef MUSTER_PARALLEL_INTEROP_HUGGING_FACE_NAMES_H_
#define MUSTER_PARALLEL_INTEROP_HUGGING_FACE_NAMES_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/tensor.h"
#include "parallel/model/families/hugging_face.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Requires: a description that MakeModel accepts. kUnimplemented for a model that has no
// counterpart there.
absl::StatusOr<HuggingFaceLayout> LayoutForHuggingFace(const Model& model);

// Whether a tensor that the layout does not list may exist, because it adds no information: a tied
// head, the constants of masks and rotations.
bool IsDerivedTensor(const ModelDescription& description, absl::string_view name);

// The name under which a stored tensor is listed: models saved without their head lack a prefix.
std::string CanonicalTensorName(const ModelDescription& description, absl::string_view name);

// The model that a config.json describes. kInvalidArgument names the key that is missing, of the
// wrong type, or asks for something that our models do not do (another activation, biases in
// Llama's layers, a rope type we do not have): nothing is ignored that changes the logits.
absl::StatusOr<ModelDescription> DescriptionFromConfig(absl::string_view config_json);

// The config.json of an exported model, whose tensors are stored as `dtype`.
absl::StatusOr<std::string> ConfigForHuggingFace(const ModelDescription& description,
                                                 kernels::DType dtype);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_INTEROP_HUGGING_FACE_NAMES_H_
