// A kind of layer: all that models, their arithmetic, their split and the plans ask about a mixer
// before there is one, and how it is made. A mixer's file defines one beside the mixer; a family
// names the kinds of its layers (LanguageModelConfig::blocks), and nothing else lists them.
#ifndef MUSTER_PARALLEL_MODEL_LAYER_KIND_H_
#define MUSTER_PARALLEL_MODEL_LAYER_KIND_H_

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/model/language_model.h"
#include "parallel/model/mixer.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
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

// Where a layer is made. A view.
struct LayerPlace {
  ParameterRegistry& registry;
  const LanguageModelConfig& config;
  const ModelParallel& parallel;
  const TensorShard& shard;
  const Recomputed& recomputed;
  const std::string& block;   // "blocks.3", with which the names of its parameters begin
  float residual_stddev = 0;  // of initial weights that write to the residual stream
};

// Functions are pure but for `make`. Each gets a configuration with what the kind needs.
struct LayerKind {
  const char* name;  // "attention"
  LayerSize (*size)(const LanguageModelConfig& config);
  // What the ranks of a tensor group share out of it. Kinds with the same SplitKind, as with equal
  // inner widths, have the same size.
  SplitUnit (*split)(const LanguageModelConfig& config);
  // Registers its parameters.
  std::unique_ptr<Mixer> (*make)(const LayerPlace& place);
  // Adds what it exchanges with the other ranks of the tensor group, of which `shard` is one, and
  // of its context group, beside the hidden states of every layer. Null: nothing.
  void (*exchange)(const LanguageModelConfig& config, const TensorShard& shard,
                   BlockExchanges& exchanges) = nullptr;
  // Fills in what Model::Shape says of it. Null: nothing.
  void (*shape)(const LanguageModelConfig& config, const TensorShard& shard,
                Model::Shape& shape) = nullptr;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_LAYER_KIND_H_
