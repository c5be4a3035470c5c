// Maps the parameters of Muster's models to the tensors and config.json of a Hugging Face model
// folder, as the documentation and checkpoints of transformers' GPT2LMHeadModel,
// LlamaForCausalLM, Mamba2ForCausalLM and NemotronHForCausalLM define them. Pure: no files.
#ifndef MUSTER_PARALLEL_INTEROP_HUGGING_FACE_NAMES_H_
#define MUSTER_PARALLEL_INTEROP_HUGGING_FACE_NAMES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/tensor.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Rows [row, row + rows) of one of our tensors are rows [source_row, source_row + rows) of `tensor`
// there; its columns, when it is stored transposed ([in, out], as GPT-2's layers are). A vector's
// elements are its rows.
struct HuggingFaceSlice {
  std::string tensor;
  bool transposed = false;
  int64_t row = 0;
  int64_t rows = 0;
  int64_t source_row = 0;
};

// One parameter of ours; the slices tile its rows, in order.
struct HuggingFaceParameter {
  std::string name;
  std::vector<int64_t> shape;
  std::vector<HuggingFaceSlice> slices;
};

struct HuggingFaceTensor {
  std::string name;
  std::vector<int64_t> shape;
};

struct HuggingFaceLayout {
  std::vector<HuggingFaceParameter> parameters;  // ours, in order of the registry
  std::vector<HuggingFaceTensor> tensors;        // theirs, in order of first use
};

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
