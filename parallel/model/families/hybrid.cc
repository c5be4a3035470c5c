#include "parallel/model/families/hybrid.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/model/description_reader.h"
#include "parallel/plan/pattern.h"

namespace muster::parallel {
namespace {

bool Has(const std::string& pattern, char letter) {
  return pattern.find(letter) != std::string::npos;
}

const LayerKind* KindOf(char letter) {
  return letter == kMambaLetter       ? &kMamba2Layer
         : letter == kAttentionLetter ? &kAttentionLayer
                                      : &kMlpLayer;
}

}  // namespace

LanguageModelConfig ConfigOf(const HybridConfig& config) {
  const auto blocks = BlocksOfPattern(config.pattern);
  CHECK_OK(blocks);
  LanguageModelConfig model;
  for (const std::string& block : *blocks) {
    std::vector<const LayerKind*>& layers = model.blocks.emplace_back();
    for (const char letter : block) layers.push_back(KindOf(letter));
  }
  model.hidden = config.hidden;
  model.heads = config.heads;
  model.kv_heads = config.kv_heads;
  model.head_width = config.head_width;
  model.ffn = config.ffn;
  model.mamba2 = config.mamba;
  model.vocab = config.vocab;
  model.sequence_length = config.sequence_length;
  model.norm = {NormKind::kRms, static_cast<float>(config.norm_epsilon)};
  model.position = config.rotary ? PositionKind::kRotary : PositionKind::kNone;
  model.rope_theta = config.rope_theta;
  model.rope_scaling = config.rope_scaling;
  model.mlp = config.mlp;
  model.bias = false;
  model.tied = config.tied;
  return model;
}

ModelDescription Describe(const HybridConfig& config) {
  const auto blocks = BlocksOfPattern(config.pattern);
  CHECK_OK(blocks);
  ModelDescription description;
  description.family = "hybrid";
  description.texts = {{"pattern", config.pattern}};
  description.sizes = {{"layers", static_cast<int64_t>(blocks->size())},
                       {"hidden", config.hidden},
                       {"vocab", config.vocab},
                       {"sequence_length", config.sequence_length}};
  description.numbers = {{"norm_epsilon", config.norm_epsilon}};
  description.flags = {{"tied", config.tied}};
  if (Has(config.pattern, kAttentionLetter)) {
    description.sizes["heads"] = config.heads;
    description.sizes["kv_heads"] = config.kv_heads;
    description.sizes["head_width"] = config.head_width;
    description.flags["rotary"] = config.rotary;
    if (config.rotary) {
      description.numbers["rope_theta"] = config.rope_theta;
      DescribeRopeScaling(config.rope_scaling, description);
    }
  }
  if (Has(config.pattern, kMlpLetter)) {
    description.sizes["ffn"] = config.ffn;
    description.texts["mlp"] = config.mlp == MlpKind::kSwiglu ? "swiglu" : "relu2";
  }
  if (Has(config.pattern, kMambaLetter)) {
    description.sizes["mamba_heads"] = config.mamba.heads;
    description.sizes["mamba_head_width"] = config.mamba.head_width;
    description.sizes["mamba_groups"] = config.mamba.groups;
    description.sizes["mamba_state"] = config.mamba.state;
    description.sizes["mamba_taps"] = config.mamba.taps;
    if (config.mamba.step_min > 0) description.numbers["mamba_step_min"] = config.mamba.step_min;
  }
  return description;
}

std::unique_ptr<Model> MakeHybrid(const HybridConfig& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

void ReadAttention(DescriptionReader& reader, HybridConfig& config) {
  config.heads = reader.Size("heads");
  config.kv_heads = reader.Size("kv_heads");
  config.head_width = reader.Size("head_width");
  reader.Require(
      config.heads % config.kv_heads == 0,
      absl::StrCat("kv_heads (", config.kv_heads, ") does not divide heads (", config.heads, ")"));
  config.rotary = reader.Flag("rotary");
  if (!config.rotary) return;
  config.rope_theta = reader.Number("rope_theta");
  config.rope_scaling = reader.RopeScaling();
  reader.Require(config.head_width % 2 == 0, absl::StrCat("head_width (", config.head_width,
                                                          ") is odd; rotary positions need pairs"));
}

absl::StatusOr<LanguageModelConfig> FromDescription(const ModelDescription& description) {
  DescriptionReader reader(description);
  HybridConfig config;
  config.pattern = reader.Text("pattern");
  const auto blocks = BlocksOfPattern(config.pattern);
  reader.Require(blocks.ok(), absl::StrCat("pattern ", blocks.status().message()));
  const int64_t layers = reader.Size("layers");
  reader.Require(!blocks.ok() || layers == static_cast<int64_t>(blocks->size()),
                 absl::StrCat("layers is ", layers, ", but the pattern has ",
                              blocks.ok() ? blocks->size() : 0, " blocks"));
  config.hidden = reader.Size("hidden");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.norm_epsilon = reader.Number("norm_epsilon");
  config.tied = reader.Flag("tied");
  if (Has(config.pattern, kAttentionLetter)) ReadAttention(reader, config);
  if (Has(config.pattern, kMlpLetter)) {
    config.ffn = reader.Size("ffn");
    const std::string mlp = reader.Text("mlp");
    config.mlp = mlp == "swiglu" ? MlpKind::kSwiglu : MlpKind::kRelu2;
    reader.Require(mlp == "swiglu" || mlp == "relu2",
                   absl::StrCat("mlp is '", mlp, "'; relu2 and swiglu are there"));
  }
  if (Has(config.pattern, kMambaLetter)) config.mamba = reader.Mamba2("mamba_");
  RETURN_IF_ERROR(reader.Finish());
  return ConfigOf(config);
}

}  // namespace

const ModelFamily kHybridFamily = {
    .name = "hybrid", .config = FromDescription, .hugging_face = &kNemotronHHuggingFace};

}  // namespace muster::parallel
