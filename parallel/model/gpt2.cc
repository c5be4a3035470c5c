#include "parallel/model/gpt2.h"

namespace muster::parallel {

TransformerConfig Transformer(const Gpt2Config& config) {
  TransformerConfig transformer;
  transformer.layers = config.layers;
  transformer.hidden = config.hidden;
  transformer.heads = config.heads;
  transformer.kv_heads = config.heads;
  transformer.ffn = 4 * config.hidden;
  transformer.vocab = config.vocab;
  transformer.sequence_length = config.sequence_length;
  return transformer;
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

int64_t ParameterCount(const Gpt2Config& config) { return ParameterCount(Transformer(config)); }

std::unique_ptr<Model> MakeGpt2(const Gpt2Config& config, const ModelParallel& parallel) {
  return MakeTransformer(Transformer(config), Describe(config), parallel);
}

}  // namespace muster::parallel
