#include "parallel/model/language_model_sizes.h"

#include <algorithm>
#include <vector>

#include "base/check.h"
#include "parallel/model/mamba2_mixer.h"

namespace muster::parallel {
namespace {

using Layers = std::vector<LayerKind>;

LayerSize AttentionSize(const LanguageModelConfig& config) {
  const int64_t c = config.hidden, width = config.heads * HeadWidth(config);
  const int64_t qkv = width + 2 * config.kv_heads * HeadWidth(config);
  // The causal half of q k^T and p v.
  return {qkv * c + c * width, config.bias ? qkv + c : 0, c * width,
          2 * config.sequence_length * width};
}

LayerSize MlpSize(const LanguageModelConfig& config) {
  const int64_t c = config.hidden;
  const int64_t up = config.mlp == MlpKind::kSwiglu ? 2 * config.ffn : config.ffn;
  return {up * c + config.ffn * c, config.bias ? up + c : 0, config.ffn * c, 0, config.ffn};
}

LayerSize Mamba2Size(const LanguageModelConfig& config) {
  const auto& mamba = config.mamba2;
  const int64_t inner = mamba.heads * mamba.head_width, group = mamba.groups * mamba.state;
  const int64_t conv = inner + 2 * group, in = inner + conv + mamba.heads;
  // Per token with chunks of Q positions: the causal halves of C B^T (per group) and of that with
  // x, the state's update and what is read from it.
  constexpr int64_t kChunk = kMamba2Chunk;
  const int64_t scan = kChunk * group + kChunk * inner + 4 * inner * mamba.state;
  // y, and a state in front of every chunk.
  const int64_t tokens = std::max<int64_t>(1, config.sequence_length);
  const int64_t chunks = (tokens + kChunk - 1) / kChunk;
  const int64_t mixing = inner + (inner * mamba.state * chunks + tokens - 1) / tokens;
  return {(in + inner) * config.hidden,
          conv * (mamba.taps + 1) + 3 * mamba.heads + inner,
          inner * config.hidden,
          scan,
          conv + inner,
          mixing};
}

bool Has(const LanguageModelConfig& config, LayerKind kind) {
  return std::any_of(config.blocks.begin(), config.blocks.end(), [&](const Layers& block) {
    return std::count(block.begin(), block.end(), kind) > 0;
  });
}

}  // namespace

LayerSize SizeOf(const LanguageModelConfig& config, LayerKind kind) {
  switch (kind) {
    case LayerKind::kAttention:
      return AttentionSize(config);
    case LayerKind::kMlp:
      return MlpSize(config);
    case LayerKind::kMamba2:
      return Mamba2Size(config);
  }
  CHECK(false) << "layer " << static_cast<int>(kind);
  return {};
}

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
    for (const LayerKind kind : block) {
      const LayerSize size = SizeOf(config, kind);
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
      const LayerSize size = SizeOf(config, block[i]);
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
    for (const LayerKind kind : block) {
      const LayerSize size = SizeOf(config, kind);
      cost += static_cast<double>(size.weights) + static_cast<double>(size.other) / 2;
    }
    costs.push_back(cost);
  }
  return costs;
}

AttentionSizes AttentionOf(const LanguageModelConfig& config) {
  if (!Has(config, LayerKind::kAttention)) return {};
  return {config.heads, config.kv_heads, HeadWidth(config)};
}

ScanSizes ScanOf(const LanguageModelConfig& config) {
  if (!Has(config, LayerKind::kMamba2)) return {};
  const LanguageModelConfig::Mamba2& mamba = config.mamba2;
  return {mamba.heads, mamba.head_width, mamba.groups, mamba.state, mamba.taps};
}

SplitList SplitOf(const LanguageModelConfig& config) {
  SplitList units;
  if (Has(config, LayerKind::kAttention)) {
    units.push_back({SplitKind::kHeads, config.heads, config.kv_heads});
  }
  if (Has(config, LayerKind::kMamba2)) {
    units.push_back({SplitKind::kScanHeads, config.mamba2.heads, config.mamba2.groups});
  }
  if (Has(config, LayerKind::kMlp)) units.push_back({SplitKind::kMlpColumns, config.ffn});
  units.push_back({SplitKind::kVocabulary, config.vocab});
  return units;
}

BlockExchanges ExchangesOf(const LanguageModelConfig& config, const Layers& block, int ranks) {
  BlockExchanges exchanges;
  exchanges.layers = static_cast<int>(block.size());
  for (const LayerKind kind : block) {
    if (kind == LayerKind::kAttention) ++exchanges.attentions;
    if (kind == LayerKind::kMamba2) ++exchanges.scans;
    // The norm in front of the output projection is over the columns of a group.
    if (kind == LayerKind::kMamba2 && config.mamba2.groups < ranks) {
      exchanges.sums_per_token += config.mamba2.groups;
    }
  }
  return exchanges;
}

}  // namespace muster::parallel
