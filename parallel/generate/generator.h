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

// Holds the parameters, without optimizer state. Every token takes a forward pass over the last
// sequence_length tokens; earlier ones are forgotten. Single-threaded.
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
