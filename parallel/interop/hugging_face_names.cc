#include "parallel/interop/hugging_face_names.h"

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/json.h"
#include "parallel/model/families/family.h"
#include "parallel/model/families/hugging_face.h"

namespace muster::parallel {
namespace {

using kernels::DType;

absl::StatusOr<const HuggingFaceFamily*> FamilyOf(const std::string& name) {
  const ModelFamily* family = FindFamily(name);
  if (family != nullptr && family->hugging_face != nullptr) return family->hugging_face;
  return absl::UnimplementedError(
      absl::StrCat("models of family '", name, "' have no counterpart at Hugging Face here"));
}

absl::StatusOr<const HuggingFaceFamily*> CounterpartOf(const ModelDescription& description) {
  ASSIGN_OR_RETURN(const HuggingFaceFamily* family, FamilyOf(description.family));
  if (family->counterpart != nullptr) RETURN_IF_ERROR(family->counterpart(description));
  return family;
}

const char* TorchName(DType dtype) {
  return dtype == DType::kF32 ? "float32" : dtype == DType::kBF16 ? "bfloat16" : "float16";
}

// Python writes infinite numbers as a bare word, which is not JSON. They become texts.
std::string WithoutInfinities(absl::string_view text) {
  constexpr absl::string_view kWord = "Infinity";
  std::string json;
  bool quoted = false;
  for (size_t i = 0; i < text.size(); ++i) {
    if (quoted && text[i] == '\\' && i + 1 < text.size()) {
      json += text[i++];
    } else if (text[i] == '"') {
      quoted = !quoted;
    } else if (!quoted && absl::StartsWith(text.substr(i), kWord)) {
      absl::StrAppend(&json, "\"", kWord, "\"");
      i += kWord.size() - 1;
      continue;
    }
    json += text[i];
  }
  return json;
}

}  // namespace

absl::StatusOr<HuggingFaceLayout> LayoutForHuggingFace(const Model& model) {
  ASSIGN_OR_RETURN(const HuggingFaceFamily* family, CounterpartOf(model.description()));
  return family->layout(model);
}

bool IsDerivedTensor(const ModelDescription& description, absl::string_view name) {
  const auto family = FamilyOf(description.family);
  return family.ok() && (*family)->is_derived(description, name);
}

std::string CanonicalTensorName(const ModelDescription& description, absl::string_view name) {
  const auto family = FamilyOf(description.family);
  const absl::string_view prefix = family.ok() ? (*family)->prefix : "";
  const bool bare = !absl::StartsWith(name, prefix) && !absl::StartsWith(name, "lm_head.");
  return absl::StrCat(bare ? prefix : "", name);
}

absl::StatusOr<ModelDescription> DescriptionFromConfig(absl::string_view config_json) {
  ASSIGN_OR_RETURN(const Json config, ParseObject(WithoutInfinities(config_json)));
  ConfigReader reader(config);
  const std::string type = reader.Text("model_type", "");
  RETURN_IF_ERROR(reader.status());
  std::vector<std::string> types;
  for (const ModelFamily* family : Families()) {
    if (family->hugging_face == nullptr) continue;
    types.emplace_back(family->hugging_face->model_type);
    if (type == types.back()) return family->hugging_face->description(config);
  }
  return absl::InvalidArgumentError(absl::StrCat("'model_type' is \"", type.substr(0, 100), "\"; ",
                                                 absl::StrJoin(types, ", "), " are there"));
}

absl::StatusOr<std::string> ConfigForHuggingFace(const ModelDescription& description, DType dtype) {
  ASSIGN_OR_RETURN(const HuggingFaceFamily* family, CounterpartOf(description));
  Json config = family->config(description);
  config["torch_dtype"] = TorchName(dtype);  // before transformers 5
  config["dtype"] = TorchName(dtype);
  return config.dump(2) + "\n";
}

}  // namespace muster::parallel
