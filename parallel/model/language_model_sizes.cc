#include "parallel/model/language_model_sizes.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "parallel/model/layer_kind.h"

namespace muster::parallel {
namespace {

using Layers = std::vector<const LayerKind*>;

}  // namespace

int64_t LayersOf(const LanguageModelConfig& config) {
  int64_t layers = 0;
  for (const Layers& block : config.blocks) layers += static_cast<int64_t>(block.size());
  return layers;
}

int64_t ParameterCount(const LanguageModelConfig& config) {
  const int64_t c = config.hidden;
  const int64_t norm = config.norm.kind == NormKind::kLayer ? 2 * c : c;
  const int64_t positions = config.position == PositionKind::kLearned ? config.sequence_length : 0;
  int64_t count = norm + ((config.tied ? 1 : 2) * config.vocab + positions) * c;
  for (const Layers& block : config.blocks) {
    for (const LayerKind* kind : block) {
      const LayerSize size = kind->size(config);
      count += size.weights + size.parameters + norm;
    }
  }
  return count;
}

Model::FlopsPerToken CountFlops(const LanguageModelConfig& config, int64_t recomputed) {
  const auto blocks = static_cast<int64_t>(config.blocks.size());
  Model::FlopsPerToken flops;
  flops.model = 6 * config.vocab * config.hidden;
  int64_t again = 0;  // recomputing every block
  for (const Layers& block : config.blocks) {
    for (size_t i = 0; i < block.size(); ++i) {
      const LayerSize size = block[i]->size(config);
      flops.model += 6 * size.weights + 3 * size.other;
      // A block's last GEMM is not recomputed.
      again += 2 * (size.weights - (i + 1 == block.size() ? size.last : 0)) + size.other;
    }
  }
  // Blocks that recompute are counted like the average one.
  flops.hardware = flops.model + recomputed * again / blocks;
  return flops;
}

std::vector<double> BlockCosts(const LanguageModelConfig& config) {
  std::vector<double> costs;
  for (const Layers& block : config.blocks) {
    double cost = 0;
    for (const LayerKind* kind : block) {
      const LayerSize size = kind->size(config);
      cost += static_cast<double>(size.weights) + static_cast<double>(size.other) / 2;
    }
    costs.push_back(cost);
  }
  return costs;
}

std::vector<const LayerKind*> LayerKindsOf(const LanguageModelConfig& config) {
  std::vector<const LayerKind*> kinds;
  for (const Layers& block : config.blocks) {
    for (const LayerKind* kind : block) {
      if (std::find(kinds.begin(), kinds.end(), kind) == kinds.end()) kinds.push_back(kind);
    }
  }
  return kinds;
}

SplitList SplitOf(const LanguageModelConfig& config) {
  SplitList units = {{SplitKind::kVocabulary, config.vocab}};
  for (const LayerKind* kind : LayerKindsOf(config)) {
    const SplitUnit unit = kind->split(config);
    const auto known = std::find_if(units.begin(), units.end(), [&](const SplitUnit& other) {
      return other.kind == unit.kind;
    });
    if (known == units.end()) {
      units.push_back(unit);
    } else {
      CHECK(known->size == unit.size && known->groups == unit.groups) << kind->name;
    }
  }
  std::sort(units.begin(), units.end(),
            [](const SplitUnit& a, const SplitUnit& b) { return a.kind < b.kind; });
  return units;
}

BlockKinds KindsOfBlocks(const LanguageModelConfig& config) {
  BlockKinds kinds;
  for (size_t i = 0; i < config.blocks.size(); ++i) {
    const auto known =
        std::find_if(kinds.first_block.begin(), kinds.first_block.end(),
                     [&](int first) { return config.blocks[first] == config.blocks[i]; });
    kinds.of_block.push_back(static_cast<int>(known - kinds.first_block.begin()));
    if (known == kinds.first_block.end()) kinds.first_block.push_back(static_cast<int>(i));
  }
  return kinds;
}

BlockExchanges ExchangesOf(const LanguageModelConfig& config, const Layers& block,
                           const TensorShard& shard) {
  BlockExchanges exchanges;
  exchanges.layers = static_cast<int>(block.size());
  for (const LayerKind* kind : block) {
    if (kind->exchange != nullptr) kind->exchange(config, shard, exchanges);
  }
  return exchanges;
}

}  // namespace muster::parallel
