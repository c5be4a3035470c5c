// Hybrid stacks: Mamba-2, attention and MLP layers in any order, each a norm and a mixer on the
// residual stream. Nemotron-H (arXiv 2504.03624) is one with squared ReLU and no positions; with
// SwiGLU and rotary positions it is of the kind of Bamba and Granite 4. RMS norms, no biases, a
// head of its own or tied to the token embedding. See language_model.h and plan/pattern.h.
#ifndef MUSTER_PARALLEL_MODEL_FAMILIES_HYBRID_H_
#define MUSTER_PARALLEL_MODEL_FAMILIES_HYBRID_H_

#include <cstdint>
#include <memory>
#include <string>

#include "kernels/attention/rotary.h"
#include "parallel/model/families/family.h"
#include "parallel/model/language_model.h"

namespace muster::parallel {

extern const ModelFamily kHybridFamily;
extern const HuggingFaceFamily kNemotronHHuggingFace;

struct HybridConfig {
  std::string pattern;  // BlocksOfPattern takes it
  int64_t hidden = 0;
  // Where the pattern has attention.
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_width = 0;
  bool rotary = false;
  double rope_theta = 10000;
  kernels::RotaryScaling rope_scaling;
  // Where it has MLPs: kRelu2 or kSwiglu.
  int64_t ffn = 0;
  MlpKind mlp = MlpKind::kRelu2;
  LanguageModelConfig::Mamba2 mamba;  // where it has Mamba-2
  int64_t vocab = 0;
  int64_t sequence_length = 0;
  bool tied = false;
  double norm_epsilon = 1e-5;
};

LanguageModelConfig ConfigOf(const HybridConfig& config);
// The text "pattern"; sizes "layers" (the blocks of the pattern), "hidden", "vocab",
// "sequence_length", the number "norm_epsilon" and the flag "tied". With attention the sizes
// "heads", "kv_heads", "head_width" and the flag "rotary", with that the number "rope_theta" and
// those of rotary scaling. With MLPs the size "ffn" and the text "mlp": "relu2" or "swiglu". With
// Mamba-2 the sizes "mamba_heads", "mamba_head_width", "mamba_groups", "mamba_state" and
// "mamba_taps", and the number "mamba_step_min" unless it is 0.
ModelDescription Describe(const HybridConfig& config);

// Requires: as MakeLanguageModel.
std::unique_ptr<Model> MakeHybrid(const HybridConfig& config, const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILIES_HYBRID_H_
