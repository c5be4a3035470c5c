#include "parallel/model/linear.h"

#include <utility>

#include "kernels/gemm/linear.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"
#include "parallel/model/norm.h"

namespace muster::parallel {
namespace {

using kernels::Tensor;

Parameter Weight(const LinearSpec& spec, const TensorShard& shard) {
  Parameter weight;
  weight.name = spec.name + ".weight";
  weight.global_shape = {spec.outputs, spec.inputs};
  weight.weight_decay = true;
  weight.by_gemm = true;
  weight.initializer = Initializer::kNormal;
  weight.stddev = spec.stddev;
  weight.sharing = shard.sharded();
  return weight;
}

kernels::LinearForwardArgs ForwardArgs(const Pass& pass, const Linear& linear, Tensor x, Tensor y) {
  kernels::LinearForwardArgs args;
  args.x = x;
  args.w = pass.weights[linear.weight];
  if (linear.bias.has_value() && linear.adds_bias) args.bias = pass.weights[*linear.bias];
  args.y = y;
  return args;
}

}  // namespace

Linear AddColumnParallel(ParameterRegistry& registry, const LinearSpec& spec,
                         const std::vector<Span>& rows, const TensorShard& shard,
                         TensorSharing sharing, bool in_two, int64_t storage_rows) {
  Parameter weight = Weight(spec, shard);
  weight.storage_rows = storage_rows;
  Parameter bias;
  bias.name = spec.name + ".bias";
  bias.global_shape = {spec.outputs};
  for (Parameter* parameter : {&weight, &bias}) {
    parameter->sharing = sharing;
    parameter->first_sharer = shard.rank == shard.share(SplitKind::kHeads).sharers.begin;
    parameter->in_two = in_two;
  }
  if (shard.size > 1) {
    for (const Span& span : rows) {
      weight.bands.push_back({{span.begin, 0}, {span.size(), spec.inputs}});
      bias.bands.push_back({{span.begin}, {span.size()}});
    }
  }
  Linear linear;
  linear.weight = registry.Add(std::move(weight));
  if (spec.bias) linear.bias = registry.Add(std::move(bias));
  return linear;
}

Linear AddRowParallel(ParameterRegistry& registry, const LinearSpec& spec, Span columns,
                      const TensorShard& shard) {
  Parameter weight = Weight(spec, shard);
  if (shard.size > 1) weight.box = {{0, columns.begin}, {spec.outputs, columns.size()}};
  Linear linear;
  linear.weight = registry.Add(std::move(weight));
  if (spec.bias) {
    linear.bias = AddVector(registry, spec.name + ".bias", spec.outputs, Initializer::kZeros);
  }
  linear.adds_bias = shard.rank == 0;
  return linear;
}

void LinearForward(const Pass& pass, const Linear& linear, Tensor x, Tensor y) {
  kernels::LinearForward(pass.stream, ForwardArgs(pass, linear, x, y));
}

void LinearForwardThrough(const Pass& pass, const Linear& linear, kernels::Epilogue activation,
                          Tensor x, Tensor pre, Tensor y) {
  kernels::LinearForwardArgs args = ForwardArgs(pass, linear, x, y);
  args.epilogue = activation;
  args.pre = pre;
  kernels::LinearForward(pass.stream, args);
}

void LinearForwardAdding(const Pass& pass, const Linear& linear, Tensor x, Tensor residual,
                         Tensor sum) {
  kernels::LinearForwardArgs args = ForwardArgs(pass, linear, x, sum);
  args.residual = residual;
  kernels::LinearForward(pass.stream, args);
}

void LinearForwardThroughRotary(const Pass& pass, const Linear& linear, Tensor x, Tensor y,
                                Tensor rotary, int64_t heads) {
  kernels::LinearForwardArgs args = ForwardArgs(pass, linear, x, y);
  args.epilogue = kernels::Epilogue::kRotary;
  args.rotary = rotary;
  args.rotary_heads = heads;
  kernels::LinearForward(pass.stream, args);
}

void LinearBackwardInput(const Pass& pass, const Linear& linear, Tensor dy, Tensor dx,
                         bool accumulate) {
  kernels::LinearBackward(
      pass.stream,
      {.dy = dy, .w = pass.weights[linear.weight], .dx = dx, .accumulate_dx = accumulate});
}

void LinearBackwardInputThrough(const Pass& pass, const Linear& linear,
                                kernels::Epilogue activation, Tensor dy, Tensor dx, Tensor pre) {
  kernels::LinearBackward(
      pass.stream,
      {.dy = dy, .w = pass.weights[linear.weight], .dx = dx, .pre = pre, .activation = activation});
}

void LinearBackwardInputThrough(const Pass& pass, const Linear& linear,
                                kernels::Epilogue activation, Tensor dy, Tensor x, Tensor dx,
                                Tensor pre, const Linear& front, bool recompute) {
  kernels::LinearBackwardArgs args;
  args.dy = dy;
  args.x = x;
  args.w = pass.weights[linear.weight];
  args.dx = dx;
  args.pre = pre;
  args.activation = activation;
  args.recompute_x = recompute;
  if (front.bias.has_value()) args.pre_dbias = (*pass.gradients)[*front.bias];
  args.accumulate = !pass.overwrite_gradients;
  kernels::LinearBackward(pass.stream, args);
  if (front.bias.has_value()) Ready(pass, *front.bias);
}

void LinearBackwardInputThroughSwiglu(const Pass& pass, const Linear& linear, Tensor dy, Tensor x,
                                      Tensor scratch, Tensor packed) {
  kernels::LinearBackwardArgs args;
  args.dy = dy;
  args.x = x;
  args.w = pass.weights[linear.weight];
  args.dx = scratch;
  args.packed = packed;
  args.d_packed = packed;
  args.recompute_x = !x.empty();
  kernels::LinearBackward(pass.stream, args);
}

void LinearBackwardWeights(const Pass& pass, const Linear& linear, Tensor dy, Tensor x,
                           bool bias_is_complete) {
  const Tensor dw = (*pass.gradients)[linear.weight];
  const bool bias = linear.bias.has_value() && !bias_is_complete;
  const Tensor dbias = bias ? (*pass.gradients)[*linear.bias] : Tensor();
  const bool accumulate = !pass.overwrite_gradients;
  if (pass.squares != nullptr) {
    bool left = false;
    kernels::WeightGradient(pass.stream,
                            {.dy = dy,
                             .x = x,
                             .dw = dw,
                             .dbias = dbias,
                             .squares = pass.squares->pairs(linear.weight),
                             .accumulate = accumulate},
                            &left);
    pass.squares->SetLeft(linear.weight, left);
  } else {
    kernels::LinearBackwardArgs args;
    args.dy = dy;
    args.x = x;
    args.w = pass.weights[linear.weight];
    args.dw = dw;
    args.dbias = dbias;
    args.accumulate = accumulate;
    kernels::LinearBackward(pass.stream, args);
  }
  if (bias) Ready(pass, *linear.bias);
  Ready(pass, linear.weight);
}

void LinearBackwardBias(const Pass& pass, const Linear& linear, Tensor sums) {
  const Tensor dbias = (*pass.gradients)[*linear.bias];
  if (pass.overwrite_gradients) {
    kernels::Copy(pass.stream, sums, dbias);
  } else {
    kernels::Axpy(pass.stream, 1.0f, sums, dbias);
  }
  Ready(pass, *linear.bias);
}

}  // namespace muster::parallel
