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
    views.push_back(parameter.box.extent.size() == 1
                        ? Tensor(buffer->data(), DType::kF32, {size})
                        : Tensor(buffer->data(), DType::kF32,
                                 {parameter.storage_rows, parameter.box.extent[1]}));
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
  const int64_t needed = static_cast<int64_t>(prompt.size()) + options.tokens;
  const int64_t window = std::min(shape.sequence_max, std::max<int64_t>(needed, 1));
  // Only the logits of the last token are computed.
  const BatchShape batch = {.batch = 1, .sequence = window, .head_tokens = 1};
  kernels::Arena arena;
  model_->TakeWorkspace(arena, batch);
  RETURN_IF_ERROR(arena.Commit(device_));
  Workspace workspace = model_->TakeWorkspace(arena, batch);

  std::vector<int32_t> text(prompt.begin(), prompt.end());
  std::vector<int32_t> context(window);
  std::vector<float> logits(shape.vocab);
  Rng rng(options.seed);
  for (int64_t i = 0; i < options.tokens; ++i) {
    const int64_t length = std::min<int64_t>(window, static_cast<int64_t>(text.size()));
    // Attention is causal, so tokens behind the last one have no effect.
    std::fill(context.begin(), context.end(), 0);
    std::copy(text.end() - length, text.end(), context.begin());
    kernels::Copy(*stream_, Tensor(context.data(), DType::kI32, {window}), workspace.flow.tokens);
    Pass pass = {*stream_, views_, HeadMode::kLogits};
    workspace.flow.logits_begin = length - 1;
    model_->Forward(pass, workspace);
    const Tensor row = workspace.flow.logits.Rows(0, 1);
    kernels::Copy(*stream_, Tensor(row.data(), DType::kF32, {shape.vocab}),
                  Tensor(logits.data(), DType::kF32, {shape.vocab}));
    RETURN_IF_ERROR(stream_->Synchronize());
    const auto token = static_cast<int32_t>(
        SampleToken(logits, options.temperature, options.top_k, rng.Uniform()));
    text.push_back(token);
    on_token(token);
  }
  return std::vector<int32_t>(text.begin() + static_cast<int64_t>(prompt.size()), text.end());
}

}  // namespace muster::parallel
