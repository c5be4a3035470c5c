#include "parallel/model/gpt2.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/description_reader.h"
#include "parallel/model/family.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

LanguageModelConfig ConfigOf(const Gpt2Config& config) {
  LanguageModelConfig model;
  model.blocks.assign(config.layers, {LayerKind::kAttention, LayerKind::kMlp});
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

int64_t ParameterCount(const Gpt2Config& config) { return ParameterCount(ConfigOf(config)); }

std::unique_ptr<Model> MakeGpt2(const Gpt2Config& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

AttentionSizes Attention(const ModelDescription& model) {
  const int64_t heads = SizeOf(model, "heads");
  return {heads, heads, SizeOf(model, "hidden") / heads};
}

SplitSizes Split(const ModelDescription& model) {
  const int64_t heads = SizeOf(model, "heads");
  return {.heads = heads,
          .kv_heads = heads,
          .ffn = 4 * SizeOf(model, "hidden"),
          .vocab = SizeOf(model, "vocab")};
}

std::vector<double> BlockCosts(const ModelDescription& model) {
  const auto c = static_cast<double>(SizeOf(model, "hidden"));
  const double attention = static_cast<double>(SizeOf(model, "sequence_length")) * c;
  return std::vector<double>(SizeOf(model, "layers"), 12 * c * c + attention);
}

absl::StatusOr<std::unique_ptr<Model>> FromDescription(const ModelDescription& description,
                                                       const ModelParallel& parallel) {
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
  RETURN_IF_ERROR(CheckStages(parallel, config.layers));
  RETURN_IF_ERROR(CheckTensorParallel(parallel, Split(description)));
  RETURN_IF_ERROR(CheckContext(parallel, config.sequence_length, Split(description)));
  return MakeGpt2(config, parallel);
}

}  // namespace

const ModelFamily kGpt2Family = {
    .name = "gpt2",
    .make = FromDescription,
    .attention = Attention,
    .scan = NoScan,
    .split = Split,
    .block_costs = BlockCosts,
    .pairs_per_block = 2,
    .sums_per_token = NoSums,
    .learned_positions = true,
};

}  // namespace muster::parallel
