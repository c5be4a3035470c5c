#include "parallel/generate/generator.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/rng.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/generate/decoder.h"
#include "parallel/train/checkpoint_names.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

int64_t SampleToken(absl::Span<const float> logits, double temperature, int64_t top_k,
                    double uniform) {
  CHECK(!logits.empty());
  std::vector<int64_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto likelier = [&](int64_t a, int64_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  int64_t count = static_cast<int64_t>(order.size());
  if (temperature <= 0) {
    count = 1;
  } else if (top_k > 0) {
    count = std::min(count, top_k);
  }
  std::partial_sort(order.begin(), order.begin() + count, order.end(), likelier);
  if (count == 1) return order[0];
  std::vector<double> weights(count);
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = std::exp((static_cast<double>(logits[order[i]]) - logits[order[0]]) / temperature);
  }
  double rest = uniform * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (int64_t i = 0; i < count; ++i) {
    rest -= weights[i];
    if (rest < 0) return order[i];
  }
  return order[count - 1];
}

int64_t KeptTokens(int64_t window) { return (window + 1) / 2; }

absl::StatusOr<std::unique_ptr<Generator>> Generator::Make(kernels::Device& device,
                                                           CheckpointReader& reader) {
  ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeModel(ReadDescription(reader.state())));
  std::unique_ptr<Generator> generator(new Generator(device, std::move(model)));
  RETURN_IF_ERROR(generator->Load(reader));
  return generator;
}

absl::Status Generator::Load(CheckpointReader& reader) {
  ASSIGN_OR_RETURN(stream_, device_.MakeStream());
  std::vector<Tensor> views;
  for (ParameterId id = 0; id < model_->parameters().size(); ++id) {
    const Parameter& parameter = model_->parameters().at(id);
    const int64_t size = parameter.storage_elements();
    // The padding behind the box is zero.
    std::vector<float> values(size, 0.0f);
    RETURN_IF_ERROR(reader.Read(parameter.name, DType::kF32, parameter.box, values.data()));
    ASSIGN_OR_RETURN(auto buffer, device_.Allocate(size * static_cast<int64_t>(sizeof(float))));
    kernels::Copy(*stream_, Tensor(values.data(), DType::kF32, {size}),
                  Tensor(buffer->data(), DType::kF32, {size}));
    RETURN_IF_ERROR(stream_->Synchronize());
    views.push_back(parameter.StorageIn(buffer->data(), DType::kF32));
    parameters_.push_back(std::move(buffer));
  }
  views_ = ParameterViews(std::move(views));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int32_t>> Generator::Generate(
    absl::Span<const int32_t> prompt, const SamplingOptions& options,
    absl::FunctionRef<void(int32_t)> on_token) {
  const Model::Shape& shape = model_->shape();
  if (prompt.empty()) return absl::InvalidArgumentError("the prompt is empty");
  for (const int32_t token : prompt) {
    if (token < 0 || token >= shape.vocab) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the prompt holds token %d, the model's vocabulary ends at %d", token, shape.vocab - 1));
    }
  }
  if (options.tokens < 0 || options.top_k < 0 || !std::isfinite(options.temperature) ||
      options.temperature < 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("tokens (%d), top_k (%d) and temperature (%g) must not be negative",
                        options.tokens, options.top_k, options.temperature));
  }
  const auto given = static_cast<int64_t>(prompt.size());
  // The last token that is drawn is not read.
  const int64_t needed = given + std::max<int64_t>(options.tokens, 1) - 1;
  const bool limited = model_->limits_text();
  const int64_t window = limited ? std::min(shape.sequence_max, needed) : needed;
  const int64_t kept = KeptTokens(shape.sequence_max);
  const int64_t per_pass =
      std::min(shape.sequence_max, std::max(std::min(given, window), window < needed ? kept : 1));
  ASSIGN_OR_RETURN(const std::unique_ptr<Decoder> decoder,
                   Decoder::Make(device_, *stream_, *model_, views_,
                                 {.batch = 1, .context = window, .tokens_per_pass = per_pass}));

  std::vector<int32_t> text(prompt.begin(), prompt.end());
  std::vector<float> logits(shape.vocab);
  Rng rng(options.seed);
  int64_t fresh = std::min(window, given);  // tokens at the end of the text that are to be read
  for (int64_t i = 0; i < options.tokens; ++i) {
    const absl::Span<const int32_t> all = text;
    ASSIGN_OR_RETURN(const Tensor row, decoder->Append(all.last(fresh)));
    kernels::Copy(*stream_, Tensor(row.data(), DType::kF32, {shape.vocab}),
                  Tensor(logits.data(), DType::kF32, {shape.vocab}));
    RETURN_IF_ERROR(stream_->Synchronize());
    const auto token = static_cast<int32_t>(
        SampleToken(logits, options.temperature, options.top_k, rng.Uniform()));
    text.push_back(token);
    on_token(token);
    fresh = 1;
    if (limited && decoder->length() == window) {
      decoder->Restart();
      fresh = kept;
    }
  }
  return std::vector<int32_t>(text.begin() + static_cast<int64_t>(prompt.size()), text.end());
}

}  // namespace muster::parallel
