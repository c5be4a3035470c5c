#include "parallel/generate/decoder.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/memory/memory.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

namespace {

BatchShape ShapeOf(const DecoderOptions& options, int64_t sequence) {
  return {.batch = options.batch,
          .sequence = sequence,
          .activation = options.activation,
          .head_tokens = options.batch};
}

}  // namespace

absl::StatusOr<std::unique_ptr<Decoder>> Decoder::Make(kernels::Device& device,
                                                       kernels::Stream& stream, const Model& model,
                                                       const ParameterViews& weights,
                                                       const DecoderOptions& options) {
  RETURN_IF_ERROR(model.CheckDecode());
  const int64_t longest = model.shape().sequence_max;
  if (options.batch < 1 || options.tokens_per_pass < 1 || options.tokens_per_pass > longest ||
      (model.limits_text() && (options.context < 1 || options.context > longest))) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "decoding %d texts of up to %d tokens in passes of %d: the model takes texts of 1 to %d "
        "tokens",
        options.batch, options.context, options.tokens_per_pass, longest));
  }
  std::unique_ptr<Decoder> decoder(new Decoder(stream, model, weights, options));
  const DecodeShape shape = {options.batch, options.context, options.activation};
  model.TakeDecodeState(decoder->arena_, shape);
  model.TakeDecodeWorkspace(decoder->arena_, ShapeOf(options, options.tokens_per_pass));
  RETURN_IF_ERROR(decoder->arena_.Commit(device));
  decoder->state_ = model.TakeDecodeState(decoder->arena_, shape);
  decoder->passes_ = decoder->arena_.Mark();
  return decoder;
}

// Passes of fewer tokens take less, so they fit.
Workspace& Decoder::WorkspaceOf(int64_t sequence) {
  Workspace& workspace = sequence == 1 ? of_one_ : of_several_;
  if (workspace.saved.empty() || workspace.batch.shape.sequence != sequence) {
    arena_.ReleaseTo(passes_);
    workspace = model_.TakeDecodeWorkspace(arena_, ShapeOf(options_, sequence));
  }
  return workspace;
}

absl::StatusOr<Tensor> Decoder::Append(absl::Span<const int32_t> tokens) {
  const auto size = static_cast<int64_t>(tokens.size());
  CHECK(size > 0 && size % options_.batch == 0) << size << " tokens of " << options_.batch;
  const int64_t count = size / options_.batch;
  if (length_max() >= 0 && length() + count > length_max()) {
    return absl::OutOfRangeError(absl::StrFormat("%d tokens behind %d others: texts end at %d",
                                                 count, length(), length_max()));
  }
  Tensor logits;
  for (int64_t begin = 0; begin < count; begin += options_.tokens_per_pass) {
    const int64_t n = std::min(options_.tokens_per_pass, count - begin);
    Workspace& workspace = WorkspaceOf(n);
    RETURN_IF_ERROR(stream_.Synchronize());
    uploads_.clear();
    for (int64_t text = 0; text < options_.batch; ++text) {
      const auto first = tokens.begin() + text * count + begin;
      uploads_.insert(uploads_.end(), first, first + n);
    }
    kernels::Copy(stream_, Tensor(uploads_.data(), DType::kI32, {options_.batch * n}),
                  workspace.batch.tokens);
    const Pass pass = {stream_, weights_, HeadMode::kLogits};
    model_.Decode(pass, workspace, state_);
    logits = workspace.forward.logits;
  }
  return logits;
}

}  // namespace muster::parallel
