#include "parallel/model/families/mamba2.h"

#include <memory>

#include "base/status_macros.h"
#include "parallel/model/description_reader.h"

namespace muster::parallel {
LanguageModelConfig ConfigOf(const Mamba2Config& config) {
  LanguageModelConfig model;
  model.blocks.assign(config.layers, {&kMamba2Layer});
  model.hidden = config.hidden;
  model.mamba2 = {config.heads, config.head_width, config.groups,
                  config.state, config.taps,       config.step_min};
  model.vocab = config.vocab;
  model.sequence_length = config.sequence_length;
  model.norm = {NormKind::kRms, static_cast<float>(config.norm_epsilon)};
  model.position = PositionKind::kNone;
  model.bias = false;
  model.tied = config.tied;
  return model;
}

ModelDescription Describe(const Mamba2Config& config) {
  ModelDescription description;
  description.family = "mamba2";
  description.sizes = {{"layers", config.layers},
                       {"hidden", config.hidden},
                       {"heads", config.heads},
                       {"head_width", config.head_width},
                       {"groups", config.groups},
                       {"state", config.state},
                       {"taps", config.taps},
                       {"vocab", config.vocab},
                       {"sequence_length", config.sequence_length}};
  description.numbers = {{"norm_epsilon", config.norm_epsilon}};
  if (config.step_min > 0) description.numbers["step_min"] = config.step_min;
  description.flags = {{"tied", config.tied}};
  return description;
}

std::unique_ptr<Model> MakeMamba2(const Mamba2Config& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

absl::StatusOr<LanguageModelConfig> FromDescription(const ModelDescription& description) {
  DescriptionReader reader(description);
  Mamba2Config config;
  config.layers = reader.Size("layers");
  config.hidden = reader.Size("hidden");
  const LanguageModelConfig::Mamba2 sizes = reader.Mamba2(/*prefix=*/"");
  config.heads = sizes.heads;
  config.head_width = sizes.head_width;
  config.groups = sizes.groups;
  config.state = sizes.state;
  config.taps = sizes.taps;
  config.step_min = sizes.step_min;
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.norm_epsilon = reader.Number("norm_epsilon");
  config.tied = reader.Flag("tied");
  RETURN_IF_ERROR(reader.Finish());
  return ConfigOf(config);
}

}  // namespace

const ModelFamily kMamba2Family = {
    .name = "mamba2", .config = FromDescription, .hugging_face = &kMamba2HuggingFace};

}  // namespace muster::parallel
