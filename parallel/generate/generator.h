// Generates text from a checkpoint, one token after the other.
#ifndef MUSTER_PARALLEL_GENERATE_GENERATOR_H_
#define MUSTER_PARALLEL_GENERATE_GENERATOR_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/model/model.h"

namespace muster::parallel {

struct SamplingOptions {
  int64_t tokens = 0;      // to generate
  double temperature = 1;  // divides the logits; 0: always the most likely token
  int64_t top_k = 0;       // draws from the k most likely tokens; 0: from all
  uint64_t seed = 0;
};

// Index of the token drawn from `logits`, where `uniform` in [0, 1) decides. Pure; equal logits are
// ordered by index, so the result is the same everywhere. Requires: logits not empty.
int64_t SampleToken(absl::Span<const float> logits, double temperature, int64_t top_k,
                    double uniform);

// The tokens that the model still sees behind a full window of `window` tokens: half of it.
int64_t KeptTokens(int64_t window);

// Holds the parameters, without optimizer state. One pass reads the prompt; every token takes one
// more pass over that token alone, from the state that the layers keep (decoder.h), and is drawn
// from the logits that a pass over all of the text would give.
//
// A model with attention or a table of positions sees a window of at most sequence_length tokens:
// of a longer prompt the last ones. When the window is full, it forgets the older half: the pass
// for the next token reads the last KeptTokens(sequence_length) tokens, as a text that begins
// there. So the model always sees between half a window and a whole one, and reading them again
// costs one pass over half a window in as many tokens. Other models (Mamba-2 without attention)
// have no window and forget nothing; a pass reads at most sequence_length tokens of the prompt at
// once.
//
// Single-threaded.
class Generator {
 public:
  // Rebuilds the model that the checkpoint describes. The device must outlive it. Status codes:
  // those of CheckpointReader, kInvalidArgument for a description that makes no model,
  // kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<Generator>> Make(kernels::Device& device,
                                                         CheckpointReader& reader);

  const Model& model() const { return *model_; }
  // The generated tokens, without the prompt; `on_token` is called with each as it is drawn.
  // kInvalidArgument: empty prompt, a token outside the vocabulary, or options out of range.
  absl::StatusOr<std::vector<int32_t>> Generate(absl::Span<const int32_t> prompt,
                                                const SamplingOptions& options,
                                                absl::FunctionRef<void(int32_t)> on_token);

 private:
  Generator(kernels::Device& device, std::unique_ptr<Model> model)
      : device_(device), model_(std::move(model)) {}
  absl::Status Load(CheckpointReader& reader);

  kernels::Device& device_;
  std::unique_ptr<Model> model_;
  std::vector<std::unique_ptr<kernels::Buffer>> parameters_;
  ParameterViews views_;
  std::unique_ptr<kernels::Stream> stream_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_GENERATE_GENERATOR_H_
