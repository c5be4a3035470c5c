#include "parallel/model/transformer.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "parallel/model/attention_mixer.h"
#include "parallel/model/dropout.h"
#include "parallel/model/embedding.h"
#include "parallel/model/head.h"
#include "parallel/model/mixer.h"
#include "parallel/model/mlp_mixer.h"
#include "parallel/model/norm.h"
#include "parallel/model/residual_block.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

// Standard deviation of the weights that write to the residual stream.
float ResidualStddev(const TransformerConfig& config) {
  return kInitialStddev / std::sqrt(2.0f * static_cast<float>(config.layers));
}

std::unique_ptr<Block> MakeBlock(ParameterRegistry& registry, const TransformerConfig& config,
                                 const ModelParallel& parallel, const TensorShard& shard,
                                 int64_t index, const Recomputed& recomputed,
                                 const Recomputed& behind) {
  ResidualBlockSpec block;
  block.name = absl::StrCat("blocks.", index);
  block.hidden = config.hidden;
  block.shard = shard;
  block.recomputed = recomputed;
  block.behind = behind;
  block.split_backward = parallel.split_backward;
  block.offload = parallel.offload_activations;
  const auto norm = [&](const char* name) {
    return AddNorm(registry, block.name + name, config.hidden, config.norm, shard.by_rows());
  };

  std::vector<ResidualLayer> layers(2);
  layers[0].norm = norm(".norm1");
  AttentionSpec attention;
  attention.name = block.name + ".attention";
  attention.hidden = config.hidden;
  attention.heads = config.heads;
  attention.kv_heads = config.kv_heads;
  attention.rotary = config.position == PositionKind::kRotary;
  attention.bias = config.bias;
  attention.stddev = kInitialStddev;
  attention.output_stddev = ResidualStddev(config);
  layers[0].mixer = MakeAttentionMixer(registry, attention, shard, parallel);
  layers[0].dropout = {parallel.dropout, Dropout::AttentionSite(index)};

  layers[1].norm = norm(".norm2");
  MlpSpec mlp;
  mlp.name = block.name + ".mlp";
  mlp.kind = config.mlp;
  mlp.hidden = config.hidden;
  mlp.ffn = config.ffn;
  mlp.bias = config.bias;
  mlp.stddev = kInitialStddev;
  mlp.output_stddev = ResidualStddev(config);
  layers[1].mixer = MakeMlpMixer(registry, mlp, shard, recomputed);
  layers[1].dropout = {parallel.dropout, Dropout::MlpSite(index)};
  return MakeResidualBlock(block, std::move(layers));
}

// Weights of one block's GEMMs.
int64_t BlockWeights(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t qkv = (config.heads + 2 * config.kv_heads) * depth;
  return qkv * c + c * c + (config.mlp == MlpKind::kSwiglu ? 3 : 2) * config.ffn * c;
}

// What each of the rank's `blocks` transformer blocks recomputes. With recompute_blocks, kSelective
// saves as many bytes as these blocks would, in as many blocks as that takes, and drops activations
// first: they are recomputed with their gradient at almost no cost, while norms cost a pass each.
std::vector<Recomputed> RecomputedBy(const ModelParallel& parallel, const TransformerConfig& config,
                                     const TensorShard& shard, int64_t blocks) {
  std::vector<Recomputed> recomputed(blocks);
  const int64_t wanted =
      parallel.recompute_blocks > 0 ? std::min<int64_t>(parallel.recompute_blocks, blocks) : blocks;
  if (parallel.recompute == Recompute::kFull) {
    std::fill_n(recomputed.begin(), wanted, Recomputed{true, true, true});
  } else if (parallel.recompute == Recompute::kSelective) {
    // Elements per token and block, on all ranks together.
    const int64_t activation = config.ffn;
    const int64_t norms = 2 * config.hidden * (shard.sequence ? 1 : shard.size);
    const int64_t values = wanted * (activation + norms);
    const int64_t activations = std::min(blocks, (values + activation - 1) / activation);
    const int64_t rest = std::max<int64_t>(0, values - activations * activation);
    const int64_t with_norms = std::min(blocks, (rest + norms - 1) / norms);
    for (int64_t i = 0; i < activations; ++i) recomputed[i].activation = true;
    for (int64_t i = 0; i < with_norms; ++i) recomputed[i].norms = true;
  }
  return recomputed;
}

}  // namespace

int64_t ParameterCount(const TransformerConfig& config) {
  const int64_t c = config.hidden, depth = c / config.heads;
  const int64_t norm = config.norm.kind == NormKind::kLayer ? 2 * c : c;
  const int64_t up = config.mlp == MlpKind::kSwiglu ? 2 * config.ffn : config.ffn;
  const int64_t biases =
      config.bias ? (config.heads + 2 * config.kv_heads) * depth + c + up + c : 0;
  const int64_t positions = config.position == PositionKind::kLearned ? config.sequence_length : 0;
  return config.layers * (BlockWeights(config) + 2 * norm + biases) + norm +
         ((config.tied ? 1 : 2) * config.vocab + positions) * c;
}

Model::FlopsPerToken CountFlops(const TransformerConfig& config, int64_t recomputed) {
  const int64_t c = config.hidden;
  // Per block, forward.
  const int64_t weights = BlockWeights(config), attention = 2 * config.sequence_length * c;
  Model::FlopsPerToken flops;
  flops.model = 6 * (config.layers * weights + config.vocab * c) + 3 * config.layers * attention;
  // A block's last GEMM is not recomputed.
  flops.hardware = flops.model + recomputed * (2 * (weights - config.ffn * c) + attention);
  return flops;
}

std::unique_ptr<Model> MakeTransformer(const TransformerConfig& config,
                                       const ModelDescription& description,
                                       const ModelParallel& parallel) {
  CHECK(config.layers > 0 && config.hidden > 0 && config.heads > 0 && config.kv_heads > 0 &&
        config.ffn > 0 && config.vocab > 0 && config.sequence_length > 0);
  CHECK_EQ(config.hidden % config.heads, 0);
  CHECK_EQ(config.heads % config.kv_heads, 0);
  const int64_t depth = config.hidden / config.heads;
  CHECK(config.position != PositionKind::kRotary || depth % 2 == 0);
  CHECK_OK(CheckTensorParallel(parallel, config.heads, config.ffn, config.vocab));
  CHECK(parallel.dropout >= 0 && parallel.dropout < 1) << parallel.dropout;
  const TensorShard tensor =
      TensorShard::Make(parallel, config.heads, config.kv_heads, config.ffn, config.vocab);
  auto registry = std::make_unique<ParameterRegistry>();
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<BlockRange> parts = parallel.parts;
  if (parts.empty()) parts.push_back({});
  const int head = static_cast<int>(config.layers) + 1;
  std::optional<ParameterId> token;
  int64_t transformers = 0;  // transformer blocks on this rank
  for (const BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    transformers += std::max(0, std::min(end, head) - std::max(part.begin, 1));
  }
  const std::vector<Recomputed> recomputed = RecomputedBy(parallel, config, tensor, transformers);
  int64_t next = 0;              // of these
  int64_t recomputed_whole = 0;  // blocks that recompute everything
  const bool has_head = std::any_of(parts.begin(), parts.end(), [&](const BlockRange& part) {
    return part.end < 0 || part.end == head + 1;
  });
  for (BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    CHECK(part.begin >= 0 && part.begin < end && end <= head + 1);
    const int first = static_cast<int>(blocks.size());
    for (int i = part.begin; i < end; ++i) {
      // A tied table is in use from the first block to the last, and its gradient from the head's
      // forward to the embedding's backward.
      const bool resident = config.tied && (i == 0 || i == head);
      registry->BeginBlock(static_cast<int>(blocks.size()), resident);
      if (i == 0) {
        const ParameterId table = AddTokenTable(
            *registry, config, tensor,
            config.tied && !has_head ? TableUse::kEmbeddingOfTwo : TableUse::kOneStage);
        if (config.tied) token = table;
        blocks.push_back(MakeEmbedding(*registry, config, tensor, parallel.context_size, table,
                                       /*shared=*/config.tied && has_head, parallel.dropout));
      } else if (i < head) {
        // The first block of a stage has none behind it.
        const Recomputed behind =
            i > part.begin + 1 && next > 0 ? recomputed[next - 1] : Recomputed{};
        const Recomputed& own = recomputed[next++];
        if (own.gemms) ++recomputed_whole;
        blocks.push_back(MakeBlock(*registry, config, parallel, tensor, i - 1, own, behind));
      } else {
        const bool shared = token.has_value();
        if (!shared) token = AddHeadTable(*registry, config, tensor);
        blocks.push_back(MakeHead(*registry, config.norm, config.hidden, tensor, *token, shared));
      }
    }
    part = {first, static_cast<int>(blocks.size())};
  }
  if (static_cast<int>(blocks.size()) == head + 1 && tensor.size == 1) {
    CHECK_EQ(registry->elements(), ParameterCount(config));
  }
  Model::Shape shape;
  shape.hidden = config.hidden;
  shape.vocab = config.vocab;
  shape.vocab_storage = tensor.vocab_storage;
  shape.sequence_max = config.sequence_length;
  shape.context_size = parallel.context_size;
  if (config.position == PositionKind::kRotary) {
    shape.rotary_width = depth;
    shape.rope_theta = config.rope_theta;
    shape.rope_scaling = config.rope_scaling;
  }
  shape.tensor_size = tensor.size;
  if (tensor.shares_kv) shape.kv_group = static_cast<int>(tensor.kv_heads.begin);
  shape.sequence_parallel = tensor.sequence;
  shape.tensor_overlap = tensor.overlap;
  shape.split_backward = parallel.split_backward;
  shape.documents = parallel.documents;
  shape.context_method = parallel.context_method;
  shape.deterministic = parallel.deterministic;
  shape.dropout = parallel.dropout > 0;
  // A bias in front of the residual stream has the column sums of d_hidden as its gradient if this
  // rank has all rows and nothing is dropped.
  shape.sums_hidden_gradient = config.bias && config.norm.kind == NormKind::kLayer &&
                               tensor.size == 1 && !shape.dropout && !shape.split_backward;
  // Assumes that the other pipeline ranks recompute as much as this one.
  const int64_t recomputed_everywhere =
      recomputed_whole * config.layers / std::max<int64_t>(1, transformers);
  return std::make_unique<Model>(description, shape, std::move(registry), std::move(blocks),
                                 CountFlops(config, recomputed_everywhere), std::move(parts));
}

}  // namespace muster::parallel
