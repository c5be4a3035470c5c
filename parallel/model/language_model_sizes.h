// Arithmetic of a language model, from its configuration alone: parameters, FLOPs, what ranks can
// share out, and what they exchange. Pure.
#ifndef MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_SIZES_H_
#define MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_SIZES_H_

#include <cstdint>
#include <vector>

#include "parallel/model/language_model.h"
#include "parallel/model/model.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// Layers of all blocks.
int64_t LayersOf(const LanguageModelConfig& config);
// Trainable parameters without padding, of the whole model.
int64_t ParameterCount(const LanguageModelConfig& config);
// `recomputed`: the number of blocks whose backward recomputes everything.
Model::FlopsPerToken CountFlops(const LanguageModelConfig& config, int64_t recomputed);
// Multiply-adds per token of every block between embedding and head, forward.
std::vector<double> BlockCosts(const LanguageModelConfig& config);

// The different kinds of layers, in order of first appearance.
std::vector<const LayerKind*> LayerKindsOf(const LanguageModelConfig& config);
// What the ranks of a tensor group share out, in the order of SplitKind.
SplitList SplitOf(const LanguageModelConfig& config);

// Which blocks between embedding and head are alike: they keep, send and cost the same.
struct BlockKinds {
  std::vector<int> of_block;     // of each block its kind, an index into...
  std::vector<int> first_block;  // of each kind the first block that is one, counted from 0
};
BlockKinds KindsOfBlocks(const LanguageModelConfig& config);

// What a block exchanges with the other ranks of the tensor group, of which `shard` is one, and of
// its context group.
BlockExchanges ExchangesOf(const LanguageModelConfig& config,
                           const std::vector<const LayerKind*>& block, const TensorShard& shard);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_SIZES_H_
