// GPT-2 (Radford et al., 2019): token and learned position embeddings, pre-norm blocks of causal
// attention and a GELU (tanh) MLP of width 4C, layer norms, biases everywhere, a head tied to the
// token embedding: 12 L C^2 + 13 L C + (V + S + 2) C parameters. See language_model.h.
#ifndef MUSTER_PARALLEL_MODEL_FAMILIES_GPT2_H_
#define MUSTER_PARALLEL_MODEL_FAMILIES_GPT2_H_

#include <cstdint>
#include <memory>

#include "parallel/model/families/family.h"
#include "parallel/model/language_model.h"

namespace muster::parallel {

extern const ModelFamily kGpt2Family;
extern const HuggingFaceFamily kGpt2HuggingFace;

struct Gpt2Config {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t vocab = 0;
  int64_t sequence_length = 0;
};

LanguageModelConfig ConfigOf(const Gpt2Config& config);
ModelDescription Describe(const Gpt2Config& config);

// Requires: as MakeLanguageModel.
std::unique_ptr<Model> MakeGpt2(const Gpt2Config& config, const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILIES_GPT2_H_
