// GPT-2 (Radford et al., 2019): token and learned position embeddings, pre-norm blocks of causal
// attention with packed QKV and a GELU (tanh) MLP of width 4C, biases everywhere, a final layer
// norm, and a head tied to the token embedding.
//
// Parameters (hidden C, layers L, vocabulary V, context S):
//   embedding.token.weight [V,C], embedding.position.weight [S,C],
//   blocks.I.norm1.{weight,bias} [C], blocks.I.attention.qkv.{weight [3C,C], bias},
//   blocks.I.attention.output.{weight [C,C], bias}, blocks.I.norm2.{weight,bias},
//   blocks.I.mlp.up.{weight [4C,C], bias}, blocks.I.mlp.down.{weight [C,4C], bias},
//   norm.{weight,bias} [C]: 12 L C^2 + 13 L C + (V + S + 2) C in all.
// Initial values: weights normal(0, 0.02), those that write to the residual stream (output, down)
// normal(0, 0.02 / sqrt(2L)), biases 0, norm weights 1. Weight decay on the 2-D weights.
//
// Kept for backward per token and block: x1, y1, attention out, x2, y2 (C each), qkv (3C), the
// MLP's pre-activation and activation (4C each), and five statistics: (16 C + H + 4) fp32. Scratch
// of Backward: 5 C + H per token, once, or the logits of a chunk of tokens (head.h).
//
// Training FLOPs per token: 6 (12 L C^2 + V C) + 6 L S C.
#ifndef MUSTER_PARALLEL_MODEL_GPT2_H_
#define MUSTER_PARALLEL_MODEL_GPT2_H_

#include <cstdint>
#include <memory>

#include "parallel/model/model.h"

namespace muster::parallel {

struct Gpt2Config {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t vocab = 0;
  int64_t sequence_length = 0;
};

// Trainable parameters without padding, by the formula above.
int64_t ParameterCount(const Gpt2Config& config);
int64_t TrainingFlopsPerToken(const Gpt2Config& config);

// Requires: every size > 0, hidden % heads == 0, and ranges within the layers + 2 blocks (the job
// spec has been validated). A head without the embedding holds a duplicate of the token table.
std::unique_ptr<Model> MakeGpt2(const Gpt2Config& config, const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_GPT2_H_
