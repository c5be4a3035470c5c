#include "parallel/model/families/gpt2.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/description_reader.h"

namespace muster::parallel {

LanguageModelConfig ConfigOf(const Gpt2Config& config) {
  LanguageModelConfig model;
  model.blocks.assign(config.layers, {&kAttentionLayer, &kMlpLayer});
  model.hidden = config.hidden;
  model.heads = config.heads;
  model.kv_heads = config.heads;
  model.ffn = 4 * config.hidden;
  model.vocab = config.vocab;
  model.sequence_length = config.sequence_length;
  return model;
}

ModelDescription Describe(const Gpt2Config& config) {
  ModelDescription description;
  description.family = "gpt2";
  description.sizes = {{"layers", config.layers},
                       {"hidden", config.hidden},
                       {"heads", config.heads},
                       {"vocab", config.vocab},
                       {"sequence_length", config.sequence_length}};
  return description;
}

std::unique_ptr<Model> MakeGpt2(const Gpt2Config& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

absl::StatusOr<LanguageModelConfig> FromDescription(const ModelDescription& description) {
  DescriptionReader reader(description);
  Gpt2Config config;
  config.layers = reader.Size("layers");
  config.hidden = reader.Size("hidden");
  config.heads = reader.Size("heads");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  reader.Require(
      config.hidden % config.heads == 0,
      absl::StrCat("heads (", config.heads, ") does not divide hidden (", config.hidden, ")"));
  RETURN_IF_ERROR(reader.Finish());
  return ConfigOf(config);
}

}  // namespace

const ModelFamily kGpt2Family = {
    .name = "gpt2", .config = FromDescription, .hugging_face = &kGpt2HuggingFace};

}  // namespace muster::parallel
