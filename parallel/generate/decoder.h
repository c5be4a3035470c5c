// Goes on with texts from a model's state (parallel/model/decode.h), with all memory planned once.
#ifndef MUSTER_PARALLEL_GENERATE_DECODER_H_
#define MUSTER_PARALLEL_GENERATE_DECODER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/model/decode.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

struct DecoderOptions {
  int64_t batch = 1;    // texts, all of the same length
  int64_t context = 0;  // the most tokens of a text; not read where the model does not limit them
  int64_t tokens_per_pass = 1;  // the most of each text: decides how much memory it takes
  kernels::DType activation = kernels::DType::kF32;
};

// Single-threaded.
class Decoder {
 public:
  // All arguments must outlive it; the weights have the activation dtype but for those in full
  // precision (Parameter::full_precision). kUnimplemented: Model::CheckDecode. kInvalidArgument:
  // the context is longer than the model takes. kResourceExhausted from the device.
  static absl::StatusOr<std::unique_ptr<Decoder>> Make(kernels::Device& device,
                                                       kernels::Stream& stream, const Model& model,
                                                       const ParameterViews& weights,
                                                       const DecoderOptions& options);

  int64_t length() const { return state_.length; }  // tokens of each text
  // The most there can be; -1: there is no limit.
  int64_t length_max() const { return model_.limits_text() ? options_.context : -1; }
  const kernels::Arena& arena() const { return arena_; }

  // The next call begins new texts.
  void Restart() { state_.length = 0; }
  // Goes on with the texts: `tokens` [batch,n] are the next n of each. Enqueues passes over at most
  // `tokens_per_pass` of them each, and returns the logits of the last token of each text,
  // [batch,V] with padding columns, valid until the next call. Requires: batch divides the number
  // of tokens, which are in the vocabulary. kOutOfRange: the texts would be longer than
  // length_max(); nothing happens. Errors of the device.
  absl::StatusOr<kernels::Tensor> Append(absl::Span<const int32_t> tokens);

 private:
  Decoder(kernels::Stream& stream, const Model& model, const ParameterViews& weights,
          const DecoderOptions& options)
      : stream_(stream), model_(model), weights_(weights), options_(options) {}
  Workspace& WorkspaceOf(int64_t sequence);

  kernels::Stream& stream_;
  const Model& model_;
  const ParameterViews& weights_;
  const DecoderOptions options_;
  kernels::Arena arena_;
  DecodeState state_;
  int64_t passes_ = 0;             // the arena's mark behind the state
  Workspace of_one_, of_several_;  // of passes over one token and over several, in one memory
  std::vector<int32_t> uploads_;   // until the stream has copied them
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_GENERATE_DECODER_H_
