#include "parallel/model/mamba2.h"

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/model/description_reader.h"
#include "parallel/model/family.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

// The limits of the CUDA kernels (kernels/ssm/ssm.h).
constexpr int64_t kWidthMax = 256;
constexpr int64_t kNormGroupMax = 16384;

}  // namespace

LanguageModelConfig ConfigOf(const Mamba2Config& config) {
  LanguageModelConfig model;
  model.blocks.assign(config.layers, {LayerKind::kMamba2});
  model.hidden = config.hidden;
  model.mamba2 = {config.heads, config.head_width, config.groups, config.state, config.taps};
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
  description.flags = {{"tied", config.tied}};
  return description;
}

std::unique_ptr<Model> MakeMamba2(const Mamba2Config& config, const ModelParallel& parallel) {
  return MakeLanguageModel(ConfigOf(config), Describe(config), parallel);
}

namespace {

AttentionSizes Attention(const ModelDescription& /*model*/) { return {}; }

ScanSizes Scan(const ModelDescription& model) {
  return {.heads = SizeOf(model, "heads"),
          .head_width = SizeOf(model, "head_width"),
          .groups = SizeOf(model, "groups"),
          .state = SizeOf(model, "state"),
          .taps = SizeOf(model, "taps")};
}

SplitSizes Split(const ModelDescription& model) {
  return {.ssm_heads = SizeOf(model, "heads"),
          .ssm_groups = SizeOf(model, "groups"),
          .vocab = SizeOf(model, "vocab")};
}

// The norm in front of the output projection is over the columns of a group.
int64_t SumsPerToken(const ModelDescription& model, int ranks) {
  const int64_t groups = SizeOf(model, "groups");
  return groups < ranks ? groups : 0;
}

std::vector<double> BlockCosts(const ModelDescription& model) {
  const auto size = [&](const char* name) { return static_cast<double>(SizeOf(model, name)); };
  const double inner = size("heads") * size("head_width"), state = size("groups") * size("state");
  const double weights = size("hidden") * (3 * inner + 2 * state + size("heads"));
  // The state's update and what is read from it.
  const double scan = 2 * inner * size("state");
  return std::vector<double>(SizeOf(model, "layers"), weights + scan);
}

absl::StatusOr<std::unique_ptr<Model>> FromDescription(const ModelDescription& description,
                                                       const ModelParallel& parallel) {
  DescriptionReader reader(description);
  Mamba2Config config;
  config.layers = reader.Size("layers");
  config.hidden = reader.Size("hidden");
  config.heads = reader.Size("heads");
  config.head_width = reader.Size("head_width");
  config.groups = reader.Size("groups");
  config.state = reader.Size("state");
  config.taps = reader.Size("taps");
  config.vocab = reader.Size("vocab");
  config.sequence_length = reader.Size("sequence_length");
  config.norm_epsilon = reader.Number("norm_epsilon");
  config.tied = reader.Flag("tied");
  reader.Require(config.head_width <= kWidthMax && config.state <= kWidthMax,
                 absl::StrCat("head_width (", config.head_width, ") and state (", config.state,
                              ") are at most ", kWidthMax));
  reader.Require(config.taps >= 2 && config.taps <= 4,
                 absl::StrCat("taps of the convolution are 2, 3 or 4, not ", config.taps));
  reader.Require(
      config.heads % config.groups == 0,
      absl::StrCat("groups (", config.groups, ") does not divide heads (", config.heads, ")"));
  reader.Require(
      config.heads / config.groups * config.head_width <= kNormGroupMax,
      absl::StrCat("a group has ", config.heads / config.groups, " heads of width ",
                   config.head_width, "; together they are at most ", kNormGroupMax, " wide"));
  RETURN_IF_ERROR(reader.Finish());
  RETURN_IF_ERROR(CheckStages(parallel, config.layers));
  RETURN_IF_ERROR(CheckTensorParallel(parallel, Split(description)));
  return MakeMamba2(config, parallel);
}

}  // namespace

const ModelFamily kMamba2Family = {
    .name = "mamba2",
    .make = FromDescription,
    .attention = Attention,
    .scan = Scan,
    .split = Split,
    .block_costs = BlockCosts,
    .pairs_per_block = 1,
    .sums_per_token = SumsPerToken,
    .learned_positions = false,
};

}  // namespace muster::parallel
