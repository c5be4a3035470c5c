#include "parallel/model/families/llama.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/description_reader.h"

namespace muster::parallel {

LanguageModelConfig ConfigOf(const LlamaConfig& config) {
  LanguageModelConfig model;
  model.blocks.assign(config.layers, {&kAttentionLayer, &kMlpLayer});
  model.hidden = config.hidden;
  model.heads = config.heads;
  model.kv_heads = config.kv_heads;
  model.ffn = config.ffn;
  model.vocab = config.vocab;
  model.sequence_length = config.sequence_length;
  model.norm = {NormKind::kRms, static_cast<float>(config.norm_epsilon)};
  model.position = PositionKind::kRotary;
  model.rope_theta = config.rope_theta;
  model.rope_scaling = config.rope_scaling;
  model.mlp = MlpKind::kSwiglu;
  model.bias = false;
  model.tied = config.tied;
  return model;
}

ModelDescription Describe(const LlamaConfig& config) {
  ModelDescription description;
  description.family = "llama";
  description.sizes = {{"layers", config.layers},
                       {"hidden", config.hidden},
                       {"heads", config.heads},
                       {"kv_heads", config.kv_heads},
                       {"ffn", config.ffn},
                       {"vocab", config.vocab},
                       {"sequence_length", config.sequence_length}};
  description.numbers = {{"norm_epsilon", config.norm_epsilon}, {"rope_theta", config.rope_theta}};
  description.flags = {{"tied", config.tied}};
  DescribeRopeScaling(config.rope_scaling, description);
  return description;
}

std::unique_ptr<Model> MakeLlama(const LlamaConfig& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

absl::StatusOr<LanguageModelConfig> FromDescription(const ModelDescription& description) {
  DescriptionReader reader(description);
  LlamaConfig config;
  config.layers = reader.Size("layers");
  config.hidden = reader.Size("hidden");
  config.heads = reader.Size("heads");
  config.kv_heads = reader.Size("kv_heads");
  config.ffn = reader.Size("ffn");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.tied = reader.Flag("tied");
  config.norm_epsilon = reader.Number("norm_epsilon");
  config.rope_theta = reader.Number("rope_theta");
  config.rope_scaling = reader.RopeScaling();
  reader.Require(
      config.hidden % config.heads == 0,
      absl::StrCat("heads (", config.heads, ") does not divide hidden (", config.hidden, ")"));
  reader.Require(
      config.heads % config.kv_heads == 0,
      absl::StrCat("kv_heads (", config.kv_heads, ") does not divide heads (", config.heads, ")"));
  reader.Require(
      config.hidden / config.heads % 2 == 0,
      absl::StrCat("the width of a head (hidden / heads = ", config.hidden / config.heads,
                   ") is odd; rotary positions need pairs"));
  RETURN_IF_ERROR(reader.Finish());
  return ConfigOf(config);
}

}  // namespace

const ModelFamily kLlamaFamily = {
    .name = "llama", .config = FromDescription, .hugging_face = &kLlamaHuggingFace};

}  // namespace muster::parallel
