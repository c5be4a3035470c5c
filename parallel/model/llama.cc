#include "parallel/model/llama.h"
#include "kernels/attention/rotary.h"

namespace muster::parallel {

TransformerConfig Transformer(const LlamaConfig& config) {
  TransformerConfig transformer;
  transformer.layers = config.layers;
  transformer.hidden = config.hidden;
  transformer.heads = config.heads;
  transformer.kv_heads = config.kv_heads;
  transformer.ffn = config.ffn;
  transformer.vocab = config.vocab;
  transformer.sequence_length = config.sequence_length;
  transformer.norm = {NormKind::kRms, static_cast<float>(config.norm_epsilon)};
  transformer.position = PositionKind::kRotary;
  transformer.rope_theta = config.rope_theta;
  transformer.rope_scaling = config.rope_scaling;
  transformer.mlp = MlpKind::kSwiglu;
  transformer.bias = false;
  transformer.tied = config.tied;
  return transformer;
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
  return MakeTransformer(Transformer(config), Describe(config), parallel);
}

}  // namespace muster::parallel
