// Llama 2 and 3 (Touvron et al., arXiv 2307.09288; Grattafiori et al., arXiv 2407.21783): rotary
// positions with Llama 3's frequency scaling, RMS norm, SwiGLU, grouped key/value heads, no biases,
// a head of its own or tied to the token embedding. See language_model.h.
#ifndef MUSTER_PARALLEL_MODEL_FAMILIES_LLAMA_H_
#define MUSTER_PARALLEL_MODEL_FAMILIES_LLAMA_H_

#include <cstdint>
#include <memory>

#include "kernels/attention/rotary.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model.h"

namespace muster::parallel {

extern const ModelFamily kLlamaFamily;
extern const HuggingFaceFamily kLlamaHuggingFace;

struct LlamaConfig {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t ffn = 0;
  int64_t vocab = 0;
  int64_t sequence_length = 0;
  bool tied = false;
  double norm_epsilon = 1e-5;
  double rope_theta = 10000;
  kernels::RotaryScaling rope_scaling;  // factor 1: none
};

LanguageModelConfig ConfigOf(const LlamaConfig& config);
ModelDescription Describe(const LlamaConfig& config);

// Requires: as MakeLanguageModel.
std::unique_ptr<Model> MakeLlama(const LlamaConfig& config, const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILIES_LLAMA_H_
