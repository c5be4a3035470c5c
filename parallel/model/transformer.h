// Pre-norm decoder-only transformers: one builder, of which GPT-2 and Llama are configurations.
//
// Parameters (hidden C, layers L, heads H of width D = C/H, key/value heads G, MLP width F,
// vocabulary V, context S); "?" marks those that a configuration may lack:
//   embedding.token.weight [V,C], embedding.position.weight? [S,C],
//   blocks.I.norm1.{weight,bias?} [C], blocks.I.attention.qkv.{weight [(H+2G)D,C], bias?}: the rows
//   of all query heads, then of the key heads, then of the value heads,
//   blocks.I.attention.output.{weight [C,C], bias?}, blocks.I.norm2.{weight,bias?},
//   blocks.I.mlp.up.{weight [F,C] (GELU) or [2F,C] (SwiGLU: gate, then up), bias?},
//   blocks.I.mlp.down.{weight [C,F], bias?}, norm.{weight,bias?} [C], head.weight? [V,C].
// Initial values: weights normal(0, 0.02), those that write to the residual stream (output, down)
// normal(0, 0.02 / sqrt(2L)), biases 0, norm weights 1. Weight decay on the 2-D weights.
//
// Kept for backward per token and block, without recompute: x1, y1, attention out, x2, y2 (C
// each), qkv ((H+2G)D), the MLP's pre-activation (F or 2F) and activation (F), and the fp32
// statistics of the norms and of attention.
#ifndef MUSTER_PARALLEL_MODEL_TRANSFORMER_H_
#define MUSTER_PARALLEL_MODEL_TRANSFORMER_H_

#include <cstdint>
#include <memory>

#include "kernels/attention/rotary.h"
#include "parallel/model/mlp_mixer.h"
#include "parallel/model/model.h"
#include "parallel/model/norm.h"

namespace muster::parallel {

// Standard deviation of initial weights, except of layers that write to the residual stream.
inline constexpr float kInitialStddev = 0.02f;

enum class PositionKind { kLearned, kRotary };

struct TransformerConfig {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t ffn = 0;
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

// Trainable parameters without padding, of the whole model.
int64_t ParameterCount(const TransformerConfig& config);
// `recomputed`: the number of layers whose backward recomputes everything.
Model::FlopsPerToken CountFlops(const TransformerConfig& config, int64_t recomputed);

// Builds the blocks and shards that `parallel` names (tensor_parallel.h). Requires:
// CheckTensorParallel, every size > 0, hidden % heads == 0, heads % kv_heads == 0, an even head
// width with kRotary, and ranges within the layers + 2 blocks (the job spec has been validated). A
// head without the embedding that it is tied to holds a duplicate of the token table.
std::unique_ptr<Model> MakeTransformer(const TransformerConfig& config,
                                       const ModelDescription& description,
                                       const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_TRANSFORMER_H_
