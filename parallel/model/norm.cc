#include "parallel/model/norm.h"

#include <utility>

#include "kernels/memory/memory.h"
#include "kernels/norm/norm.h"
#include "kernels/tensor.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

ParameterId AddVector(ParameterRegistry& registry, const std::string& name, int64_t size,
                      Initializer initializer, TensorSharing sharing) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {size};
  parameter.initializer = initializer;
  parameter.sharing = sharing;
  return registry.Add(std::move(parameter));
}

void Ready(const Pass& pass, ParameterId parameter) {
  if (pass.listener != nullptr) pass.listener->GradientReady(parameter);
}

Norm AddNorm(ParameterRegistry& registry, const std::string& name, int64_t width,
             const NormSpec& spec, TensorSharing sharing) {
  Norm norm;
  norm.spec = spec;
  norm.weight = AddVector(registry, name + ".weight", width, Initializer::kOnes, sharing);
  if (spec.kind == NormKind::kLayer) {
    norm.bias = AddVector(registry, name + ".bias", width, Initializer::kZeros, sharing);
  }
  return norm;
}

NormSaved NormSaved::Take(Arena& arena, DType activation, const Norm& norm, int64_t rows,
                          int64_t width) {
  NormSaved saved;
  saved.TakeInput(arena, "activations", activation, rows, width);
  saved.TakeOutput(arena, "activations", activation, rows, width);
  saved.TakeStatistics(arena, "activations", norm, rows);
  return saved;
}

void NormSaved::TakeInput(Arena& arena, const std::string& category, DType activation, int64_t rows,
                          int64_t width) {
  x = arena.Take(category, activation, {rows, width});
}

void NormSaved::TakeOutput(Arena& arena, const std::string& category, DType activation,
                           int64_t rows, int64_t width) {
  y = arena.Take(category, activation, {rows, width});
}

void NormSaved::TakeStatistics(Arena& arena, const std::string& category, const Norm& norm,
                               int64_t rows) {
  if (norm.spec.kind == NormKind::kLayer) mean = arena.Take(category, DType::kF32, {rows});
  rstd = arena.Take(category, DType::kF32, {rows});
}

NormSaved NormSaved::Slice(int slices, int slice) const {
  const auto slice_of = [&](const Tensor& of) {
    return of.empty() ? of : SliceOf(of, slices, slice);
  };
  return {slice_of(x), slice_of(y), slice_of(mean), slice_of(rstd)};
}

NormGradients NormGradients::Take(Arena& arena, const std::string& category, const Norm& norm,
                                  int64_t width) {
  NormGradients gradients;
  gradients.weight = arena.Take(category, DType::kF32, {width});
  if (norm.spec.kind == NormKind::kLayer) {
    gradients.bias = arena.Take(category, DType::kF32, {width});
  }
  return gradients;
}

namespace {

template <typename Args>
void FillForward(const Pass& pass, const Norm& norm, Tensor residual, Tensor branch,
                 const NormSaved& saved, Args& args) {
  args.residual = residual;
  args.branch = branch;
  args.sum = branch.empty() ? Tensor() : saved.x;
  args.gamma = pass.weights[norm.weight];
  args.y = saved.y;
  args.rstd = saved.rstd;
  args.epsilon = norm.spec.epsilon;
}

template <typename Args>
void FillBackward(const Pass& pass, const Norm& norm, Tensor dy, Tensor x, const NormSaved& saved,
                  Tensor d_hidden, const NormGradients& gradients, bool accumulate, Args& args) {
  args.dy = dy;
  args.x = x;
  args.gamma = pass.weights[norm.weight];
  args.rstd = saved.rstd;
  args.dx = d_hidden;
  args.dgamma = gradients.weight;
  args.accumulate = accumulate;
}

// Column sums of d_hidden, which layer norm's backward computes.
struct HiddenSums {
  Tensor to;  // empty: they are not computed
  bool accumulate = false;
};

// Adds to `gradients`, or overwrites them.
void Backward(const Pass& pass, const Norm& norm, Tensor dy, Tensor x, const NormSaved& saved,
              Tensor d_hidden, const NormGradients& gradients, bool accumulate,
              const HiddenSums& sums = {}) {
  if (norm.spec.kind == NormKind::kLayer) {
    kernels::LayerNormBackwardArgs args;
    FillBackward(pass, norm, dy, x, saved, d_hidden, gradients, accumulate, args);
    args.mean = saved.mean;
    args.dbeta = gradients.bias;
    args.dx_sums = sums.to;
    args.accumulate_dx_sums = sums.accumulate;
    kernels::LayerNormBackward(pass.stream, args);
  } else {
    kernels::RmsNormBackwardArgs args;
    FillBackward(pass, norm, dy, x, saved, d_hidden, gradients, accumulate, args);
    kernels::RmsNormBackward(pass.stream, args);
  }
}

NormGradients Views(const Pass& pass, const Norm& norm) {
  return {(*pass.gradients)[norm.weight], norm.bias >= 0 ? (*pass.gradients)[norm.bias] : Tensor()};
}

void Complete(const Pass& pass, const Norm& norm) {
  if (norm.bias >= 0) Ready(pass, norm.bias);
  Ready(pass, norm.weight);
}

}  // namespace

void NormForward(const Pass& pass, const Norm& norm, Tensor residual, Tensor branch,
                 const NormSaved& saved) {
  if (norm.spec.kind == NormKind::kLayer) {
    kernels::LayerNormForwardArgs args;
    FillForward(pass, norm, residual, branch, saved, args);
    args.beta = pass.weights[norm.bias];
    args.mean = saved.mean;
    kernels::LayerNormForward(pass.stream, args);
  } else {
    kernels::RmsNormForwardArgs args;
    FillForward(pass, norm, residual, branch, saved, args);
    kernels::RmsNormForward(pass.stream, args);
  }
}

void NormForward(const Pass& pass, const Norm& norm, ForwardState& state, const NormSaved& saved) {
  if (state.second_branch.empty()) {
    NormForward(pass, norm, state.residual, state.branch, saved);
  } else {
    for (const int half : {0, 1}) {
      NormForward(pass, norm, SliceOf(state.residual, 2, half),
                  half == 0 ? state.branch : state.second_branch, saved.Slice(2, half));
    }
  }
  if (!state.branch.empty()) state.residual = saved.x;
  state.branch = Tensor();
  state.second_branch = Tensor();
}

void NormBackward(const Pass& pass, const Norm& norm, Tensor dy, Tensor x, const NormSaved& saved,
                  BackwardState& state, Tensor d_bias) {
  const bool to_state = d_bias.empty() && !state.d_hidden_sums.empty();
  const HiddenSums sums = to_state ? HiddenSums{state.d_hidden_sums}
                                   : HiddenSums{d_bias, /*accumulate=*/!pass.overwrite_gradients};
  Backward(pass, norm, dy, x, saved, state.d_hidden, Views(pass, norm), !pass.overwrite_gradients,
           sums);
  state.d_hidden_summed = to_state;
  Complete(pass, norm);
}

void NormBackwardInSlices(const Pass& pass, const Norm& norm, const std::array<Started, 2>& dy,
                          Tensor x, const NormSaved& saved, Tensor d_hidden,
                          absl::FunctionRef<void(int slice)> behind) {
  for (const int slice : {0, 1}) {
    Backward(pass, norm, TensorShard::Await(pass, dy[slice]), SliceOf(x, 2, slice),
             saved.Slice(2, slice), SliceOf(d_hidden, 2, slice), Views(pass, norm),
             slice > 0 || !pass.overwrite_gradients);
    if (slice == 1) Complete(pass, norm);
    behind(slice);
  }
}

void NormBackwardInput(const Pass& pass, const Norm& norm, Tensor dy, Tensor x,
                       const NormSaved& saved, Tensor d_hidden, const NormGradients& gradients) {
  kernels::Zero(pass.stream, gradients.weight);
  if (!gradients.bias.empty()) kernels::Zero(pass.stream, gradients.bias);
  Backward(pass, norm, dy, x, saved, d_hidden, gradients, !pass.overwrite_gradients);
}

void NormBackwardWeights(const Pass& pass, const Norm& norm, const NormGradients& gradients) {
  const NormGradients views = Views(pass, norm);
  kernels::Axpy(pass.stream, 1.0f, gradients.weight, views.weight);
  if (!gradients.bias.empty()) kernels::Axpy(pass.stream, 1.0f, gradients.bias, views.bias);
  Complete(pass, norm);
}

}  // namespace muster::parallel
