#include "parallel/model/llama.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/description_reader.h"
#include "parallel/model/family.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

LanguageModelConfig ConfigOf(const LlamaConfig& config) {
  LanguageModelConfig model;
  model.blocks.assign(config.layers, {LayerKind::kAttention, LayerKind::kMlp});
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
  const kernels::RotaryScaling& scaling = config.rope_scaling;
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
  if (scaling.factor != 1) {
    description.sizes["rope_original_context"] = scaling.original_context;
    description.numbers["rope_factor"] = static_cast<double>(scaling.factor);
    description.numbers["rope_low_frequency_factor"] =
        static_cast<double>(scaling.low_frequency_factor);
    description.numbers["rope_high_frequency_factor"] =
        static_cast<double>(scaling.high_frequency_factor);
  }
  return description;
}

std::unique_ptr<Model> MakeLlama(const LlamaConfig& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

AttentionSizes Attention(const ModelDescription& model) {
  const int64_t heads = SizeOf(model, "heads");
  return {heads, SizeOf(model, "kv_heads"), SizeOf(model, "hidden") / heads};
}

SplitSizes Split(const ModelDescription& model) {
  return {.heads = SizeOf(model, "heads"),
          .kv_heads = SizeOf(model, "kv_heads"),
          .ffn = SizeOf(model, "ffn"),
          .vocab = SizeOf(model, "vocab")};
}

std::vector<double> BlockCosts(const ModelDescription& model) {
  const AttentionSizes sizes = Attention(model);
  const auto c = static_cast<double>(SizeOf(model, "hidden"));
  const auto key_width = static_cast<double>(sizes.depth * sizes.kv_heads);
  const auto ffn = static_cast<double>(SizeOf(model, "ffn"));
  // q k^T and p v, half of each.
  const double attention = static_cast<double>(SizeOf(model, "sequence_length")) * c;
  const double block = 2 * c * c + 2 * c * key_width + 3 * c * ffn + attention;
  return std::vector<double>(SizeOf(model, "layers"), block);
}

absl::StatusOr<std::unique_ptr<Model>> FromDescription(const ModelDescription& description,
                                                       const ModelParallel& parallel) {
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
  kernels::RotaryScaling& scaling = config.rope_scaling;
  scaling.factor = static_cast<float>(reader.Number("rope_factor", 1));
  scaling.low_frequency_factor = static_cast<float>(reader.Number("rope_low_frequency_factor", 1));
  scaling.high_frequency_factor =
      static_cast<float>(reader.Number("rope_high_frequency_factor", 4));
  scaling.original_context = reader.Size("rope_original_context", 8192);
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
  reader.Require(
      scaling.factor >= 1 && scaling.high_frequency_factor > scaling.low_frequency_factor,
      "rope_factor is below 1, or rope_high_frequency_factor not above the low one");
  RETURN_IF_ERROR(reader.Finish());
  RETURN_IF_ERROR(CheckStages(parallel, config.layers));
  RETURN_IF_ERROR(CheckTensorParallel(parallel, Split(description)));
  RETURN_IF_ERROR(CheckContext(parallel, config.sequence_length, Split(description)));
  return MakeLlama(config, parallel);
}

}  // namespace

const ModelFamily kLlamaFamily = {
    .name = "llama",
    .make = FromDescription,
    .attention = Attention,
    .scan = NoScan,
    .split = Split,
    .block_costs = BlockCosts,
    .pairs_per_block = 2,
    .sums_per_token = NoSums,
    .learned_positions = false,
};

}  // namespace muster::parallel
