#include "parallel/model/norm.h"

#include <utility>

#include "kernels/ops.h"

namespace muster::parallel {

using kernels::Arena;
using kernels::DType;
using kernels::Tensor;

ParameterId AddVector(ParameterRegistry& registry, const std::string& name, int64_t size,
                      Initializer initializer) {
  Parameter parameter;
  parameter.name = name;
  parameter.global_shape = {size};
  parameter.initializer = initializer;
  return registry.Add(std::move(parameter));
}

void Ready(const Pass& pass, ParameterId parameter) {
  if (pass.listener != nullptr) pass.listener->GradientReady(parameter);
}

Norm AddNorm(ParameterRegistry& registry, const std::string& name, int64_t width) {
  // Two statements: the order of registration is the order of storage.
  const ParameterId weight = AddVector(registry, name + ".weight", width, Initializer::kOnes);
  return {weight, AddVector(registry, name + ".bias", width, Initializer::kZeros)};
}

NormSaved NormSaved::Take(Arena& arena, const BatchShape& shape, int64_t width) {
  const int64_t tokens = shape.tokens();
  NormSaved saved;
  saved.x = arena.Take("activations", shape.activation, {tokens, width});
  saved.y = arena.Take("activations", shape.activation, {tokens, width});
  saved.mean = arena.Take("activations", DType::kF32, {tokens});
  saved.rstd = arena.Take("activations", DType::kF32, {tokens});
  return saved;
}

void NormForward(const Pass& pass, const Norm& norm, Flow& flow, NormSaved& saved) {
  kernels::LayerNormForwardArgs args;
  args.residual = flow.residual;
  args.branch = flow.branch;
  args.sum = flow.branch.empty() ? Tensor() : saved.x;
  args.gamma = pass.weights[norm.weight];
  args.beta = pass.weights[norm.bias];
  args.y = saved.y;
  args.mean = saved.mean;
  args.rstd = saved.rstd;
  kernels::LayerNormForward(pass.stream, args);
  if (!flow.branch.empty()) flow.residual = saved.x;
  flow.branch = Tensor();
}

void NormBackward(const Pass& pass, const Norm& norm, Tensor dy, Tensor x, const NormSaved& saved,
                  Tensor d_hidden) {
  kernels::LayerNormBackwardArgs args;
  args.dy = dy;
  args.x = x;
  args.gamma = pass.weights[norm.weight];
  args.mean = saved.mean;
  args.rstd = saved.rstd;
  args.dx = d_hidden;
  args.dgamma = (*pass.gradients)[norm.weight];
  args.dbeta = (*pass.gradients)[norm.bias];
  kernels::LayerNormBackward(pass.stream, args);
  Ready(pass, norm.bias);
  Ready(pass, norm.weight);
}

}  // namespace muster::parallel
