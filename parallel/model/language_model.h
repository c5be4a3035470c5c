// Decoder-only language models: one builder, of which the families are configurations. A model is
// an embedding, blocks of the residual stream (residual_block.h), and a head with the final norm.
//
// Parameters (hidden C, vocabulary V, context S; "?" marks those that a configuration may lack):
//   embedding.token.weight [V,C], embedding.position.weight? [S,C],
//   blocks.I.: those of its layers, norm.{weight,bias?} [C], head.weight? [V,C].
// A layer is a norm and a mixer. The norm is NORM.{weight,bias?} [C], where NORM is "norm", or
// "norm1" and "norm2" in blocks of two layers. Of the mixers (heads H of width D, key/value
// heads G, MLP width F):
//   attention.qkv.{weight [(H+2G)D,C], bias?}: the rows of all query heads, then of the key heads,
//   then of the value heads; attention.output.{weight [C,HD], bias?} mlp.up.{weight [F,C] (GELU,
//   ReLU2) or [2F,C] (SwiGLU: gate, then up), bias?}, mlp.down.{weight [C,F], bias?} mamba.*:
//   mamba2_mixer.h
// Initial values: weights normal(0, 0.02), those that write to the residual stream normal(0, 0.02 /
// sqrt(layers of all blocks)), biases 0, norm weights 1. Weight decay on the matrices of GEMMs and
// on tables.
#ifndef MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_H_
#define MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/rotary.h"
#include "parallel/model/mlp_mixer.h"
#include "parallel/model/model.h"
#include "parallel/model/norm.h"

namespace muster::parallel {

// Standard deviation of initial weights, except of layers that write to the residual stream.
inline constexpr float kInitialStddev = 0.02f;

enum class PositionKind { kLearned, kRotary, kNone };

struct LayerKind;  // layer_kind.h
extern const LayerKind kAttentionLayer, kMlpLayer, kMamba2Layer;

struct LanguageModelConfig {
  // The layers of every block, one or two. Of the fields below, those count that these kinds read.
  std::vector<std::vector<const LayerKind*>> blocks;
  int64_t hidden = 0;
  // Attention.
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_width = 0;  // 0: hidden / heads
  int64_t ffn = 0;         // of the MLP
  struct Mamba2 {
    int64_t heads = 0;
    int64_t head_width = 0;
    int64_t groups = 1;
    int64_t state = 0;
    int64_t taps = 4;
    double step_min = 0;  // of the steps of the scan
  } mamba2;
  int64_t vocab = 0;
  int64_t sequence_length = 0;
  NormSpec norm;
  PositionKind position = PositionKind::kLearned;
  double rope_theta = 10000;  // kRotary
  kernels::RotaryScaling rope_scaling;
  MlpKind mlp = MlpKind::kGelu;
  bool bias = true;  // of the linear layers
  bool tied = true;  // the head's matrix is the token table
};

// The width of an attention head. Requires: heads > 0.
inline int64_t HeadWidth(const LanguageModelConfig& config) {
  return config.head_width > 0 ? config.head_width : config.hidden / config.heads;
}

// Builds the blocks and shards that `parallel` names (tensor_parallel.h). Requires:
// CheckTensorParallel, every size of the layers there are > 0, hidden % heads == 0 or a head_width,
// heads % kv_heads == 0, an even head width with kRotary, mamba2.heads % groups == 0, and ranges
// within the blocks and the two at the ends (the job spec has been validated). A head without the
// embedding that it is tied to holds a duplicate of the token table.
std::unique_ptr<Model> MakeLanguageModel(const LanguageModelConfig& config,
                                         const ModelDescription& description,
                                         const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_LANGUAGE_MODEL_H_
