#include "parallel/model/language_model.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "parallel/model/dropout.h"
#include "parallel/model/embedding.h"
#include "parallel/model/head.h"
#include "parallel/model/language_model_sizes.h"
#include "parallel/model/layer_kind.h"
#include "parallel/model/mixer.h"
#include "parallel/model/norm.h"
#include "parallel/model/residual_block.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {
namespace {

using Layers = std::vector<const LayerKind*>;

// Makes the layers of one model.
class LayerMaker {
 public:
  LayerMaker(ParameterRegistry& registry, const LanguageModelConfig& config,
             const ModelParallel& parallel, const TensorShard& shard)
      : registry_(registry),
        config_(config),
        parallel_(parallel),
        shard_(shard),
        residual_stddev_(kInitialStddev / std::sqrt(static_cast<float>(LayersOf(config)))) {
    for (const Layers& block : config.blocks) {
      inner_sums_ = std::max(inner_sums_, static_cast<int>(block.size()) - 1);
    }
  }

  std::unique_ptr<Block> Make(int64_t index, const Recomputed& recomputed,
                              const Recomputed& behind) const {
    const Layers& kinds = config_.blocks[index];
    ResidualBlockSpec block;
    block.name = absl::StrCat("blocks.", index);
    block.hidden = config_.hidden;
    block.shard = shard_;
    block.recomputed = recomputed;
    block.behind = behind;
    block.split_backward = parallel_.split_backward;
    block.offload = parallel_.offload_activations;
    block.inner_sums = inner_sums_;
    std::vector<ResidualLayer> layers(kinds.size());
    for (size_t i = 0; i < kinds.size(); ++i) {
      const std::string number = kinds.size() > 1 ? absl::StrCat(i + 1) : "";
      layers[i].norm = AddNorm(registry_, absl::StrCat(block.name, ".norm", number), config_.hidden,
                               config_.norm, shard_.by_rows());
      layers[i].mixer = kinds[i]->make({.registry = registry_,
                                        .config = config_,
                                        .parallel = parallel_,
                                        .shard = shard_,
                                        .recomputed = recomputed,
                                        .block = block.name,
                                        .residual_stddev = residual_stddev_});
      layers[i].dropout = {parallel_.dropout, i == 0 ? Dropout::FirstLayerSite(index)
                                                     : Dropout::SecondLayerSite(index)};
    }
    return MakeResidualBlock(block, std::move(layers));
  }

 private:
  ParameterRegistry& registry_;
  const LanguageModelConfig& config_;
  const ModelParallel& parallel_;
  const TensorShard& shard_;
  float residual_stddev_;  // of the weights that write to the residual stream
  int inner_sums_ = 0;
};

// What each of the rank's `blocks` blocks recomputes. With recompute_blocks, kSelective
// saves as many bytes as these blocks would, in as many blocks as that takes, and drops activations
// first: they are recomputed with their gradient at almost no cost, while norms cost a pass each.
std::vector<Recomputed> RecomputedBy(const ModelParallel& parallel,
                                     const LanguageModelConfig& config, const TensorShard& shard,
                                     int64_t blocks) {
  std::vector<Recomputed> recomputed(blocks);
  const int64_t wanted =
      parallel.recompute_blocks > 0 ? std::min<int64_t>(parallel.recompute_blocks, blocks) : blocks;
  if (parallel.recompute == Recompute::kFull) {
    std::fill_n(recomputed.begin(), wanted, Recomputed{true, true, true, true});
    if (parallel.recompute_rest == Recompute::kSelective) {
      std::fill(recomputed.begin() + wanted, recomputed.end(), Recomputed{true, true, true, false});
    }
  } else if (parallel.recompute == Recompute::kSelective) {
    // Elements per token, on all ranks together; then of the average block.
    int64_t activation = 0, norms = 0, mixing = 0;  // of all blocks of the model
    for (const Layers& block : config.blocks) {
      for (const LayerKind* kind : block) {
        const LayerSize size = kind->size(config);
        activation += size.activation;
        norms += config.hidden * (shard.sequence ? 1 : shard.size);
        // Context ranks would have to exchange again (Mixer::TakeMixed).
        if (parallel.context_size == 1) mixing += size.mixing;
      }
    }
    const auto of_a_block = [&](int64_t values) {
      return std::max<int64_t>(1, values / static_cast<int64_t>(config.blocks.size()));
    };
    int64_t values = wanted * (of_a_block(activation) + of_a_block(norms) +
                               (mixing > 0 ? of_a_block(mixing) : 0));
    const auto drop = [&](int64_t elements, bool Recomputed::*what) {
      const int64_t each = of_a_block(elements);
      const int64_t count = std::min(blocks, (std::max<int64_t>(0, values) + each - 1) / each);
      for (int64_t i = 0; i < count; ++i) recomputed[i].*what = true;
      values -= count * each;
    };
    drop(activation, &Recomputed::activation);
    drop(norms, &Recomputed::norms);
    if (mixing > 0) drop(mixing, &Recomputed::mixing);
  }
  return recomputed;
}

}  // namespace

std::unique_ptr<Model> MakeLanguageModel(const LanguageModelConfig& config,
                                         const ModelDescription& description,
                                         const ModelParallel& parallel) {
  CHECK(!config.blocks.empty() && config.hidden > 0 && config.vocab > 0 &&
        config.sequence_length > 0);
  const auto layers = static_cast<int64_t>(config.blocks.size());
  const SplitList units = SplitOf(config);
  CHECK_OK(CheckTensorParallel(parallel, units));
  CHECK(parallel.dropout >= 0 && parallel.dropout < 1) << parallel.dropout;
  const TensorShard tensor = TensorShard::Make(parallel, units);
  auto registry = std::make_unique<ParameterRegistry>();
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<BlockRange> parts = parallel.parts;
  if (parts.empty()) parts.push_back({});
  const int head = static_cast<int>(layers) + 1;
  std::optional<ParameterId> token;
  Model::Shape shape;
  int64_t own_blocks = 0;  // between embedding and head, on this rank
  for (const BlockRange& part : parts) {
    const int end = part.end < 0 ? head + 1 : part.end;
    own_blocks += std::max(0, std::min(end, head) - std::max(part.begin, 1));
  }
  const std::vector<Recomputed> recomputed = RecomputedBy(parallel, config, tensor, own_blocks);
  const LayerMaker layer_maker(*registry, config, parallel, tensor);
  int64_t next = 0;              // of `recomputed`
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
            i > std::max(part.begin, 1) && next > 0 ? recomputed[next - 1] : Recomputed{};
        const Recomputed& own = recomputed[next++];
        if (own.gemms) ++recomputed_whole;
        blocks.push_back(layer_maker.Make(i - 1, own, behind));
        shape.exchanges.push_back(ExchangesOf(config, config.blocks[i - 1], tensor));
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
  shape.hidden = config.hidden;
  shape.vocab = config.vocab;
  shape.vocab_storage = tensor.vocab_storage;
  shape.sequence_max = config.sequence_length;
  shape.context_size = parallel.context_size;
  for (const LayerKind* kind : LayerKindsOf(config)) {
    if (kind->shape != nullptr) kind->shape(config, tensor, shape);
  }
  shape.tensor_size = tensor.size;
  shape.sequence_parallel = tensor.sequence;
  shape.tensor_overlap = tensor.overlap;
  shape.split_backward = parallel.split_backward;
  shape.documents = parallel.documents;
  shape.context_method = parallel.context_method;
  shape.scan_method = parallel.scan_method;
  shape.deterministic = parallel.deterministic;
  shape.dropout = parallel.dropout > 0;
  // A bias in front of the residual stream has the column sums of d_hidden as its gradient if this
  // rank has all rows and nothing is dropped.
  shape.sums_hidden_gradient = config.bias && config.norm.kind == NormKind::kLayer &&
                               tensor.size == 1 && !shape.dropout && !shape.split_backward;
  // Assumes that the other pipeline ranks recompute as much as this one.
  const int64_t recomputed_everywhere =
      recomputed_whole * layers / std::max<int64_t>(1, own_blocks);
  return std::make_unique<Model>(description, shape, std::move(registry), std::move(blocks),
                                 CountFlops(config, recomputed_everywhere), std::move(parts));
}

}  // namespace muster::parallel
