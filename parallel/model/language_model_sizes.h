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

// Sizes of one layer in the whole model.
struct LayerSize {
  int64_t weights = 0;     // of its GEMMs
  int64_t parameters = 0;  // beside these and the norm
  int64_t last = 0;        // weights of its last GEMM, which recompute leaves out
  int64_t other = 0;       // FLOPs per token beside those of weights, forward
  int64_t activation = 0;  // elements per token that are cheap to recompute, beside the norm's
  int64_t mixing = 0;      // elements per token that only running the mixer again recomputes
};
LayerSize SizeOf(const LanguageModelConfig& config, LayerKind kind);

// Layers of all blocks.
int64_t LayersOf(const LanguageModelConfig& config);
// Trainable parameters without padding, of the whole model.
int64_t ParameterCount(const LanguageModelConfig& config);
// `recomputed`: the number of blocks whose backward recomputes everything.
Model::FlopsPerToken CountFlops(const LanguageModelConfig& config, int64_t recomputed);
// Multiply-adds per token of every block between embedding and head, forward.
std::vector<double> BlockCosts(const LanguageModelConfig& config);

// Attention, the same in all blocks that have it; all 0 in a model without.
AttentionSizes AttentionOf(const LanguageModelConfig& config);
// State-space mixers, likewise.
ScanSizes ScanOf(const LanguageModelConfig& config);
// What the ranks of a tensor group share out. Sizes of mixers that no block has are 0.
SplitList SplitOf(const LanguageModelConfig& config);
// What a block exchanges with the other ranks of a tensor group of `ranks` and of its context
// group.
BlockExchanges ExchangesOf(const LanguageModelConfig& config, const std::vector<LayerKind>& block,
                           int ranks);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_SIZES_H_
