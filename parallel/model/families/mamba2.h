// Mamba-2 (Dao and Gu, arXiv 2405.21060): every block is a norm and a Mamba-2 mixer; no attention,
// no MLP, no positions. RMS norm, a head of its own or tied to the token embedding. See
// language_model.h and mamba2_mixer.h.
#ifndef MUSTER_PARALLEL_MODEL_FAMILIES_MAMBA2_H_
#define MUSTER_PARALLEL_MODEL_FAMILIES_MAMBA2_H_

#include <cstdint>
#include <memory>

#include "parallel/model/families/family.h"
#include "parallel/model/language_model.h"

namespace muster::parallel {

extern const ModelFamily kMamba2Family;
extern const HuggingFaceFamily kMamba2HuggingFace;

struct Mamba2Config {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t head_width = 64;
  int64_t groups = 1;
  int64_t state = 128;
  int64_t taps = 4;     // of the convolution
  double step_min = 0;  // of the steps of the scan
  int64_t vocab = 0;
  int64_t sequence_length = 0;  // of training; the model itself has no longest context
  bool tied = true;
  double norm_epsilon = 1e-5;
};

LanguageModelConfig ConfigOf(const Mamba2Config& config);
// Sizes "layers", "hidden", "heads", "head_width", "groups", "state", "taps", "vocab" and
// "sequence_length", the number "norm_epsilon", "step_min" unless 0, and the flag "tied".
ModelDescription Describe(const Mamba2Config& config);

// Requires: as MakeLanguageModel.
std::unique_ptr<Model> MakeMamba2(const Mamba2Config& config, const ModelParallel& parallel = {});

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_FAMILIES_MAMBA2_H_
