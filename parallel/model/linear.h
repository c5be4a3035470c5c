// Linear layers with their parameters, whole or this rank's shard of them (tensor_parallel.h).
#ifndef MUSTER_PARALLEL_MODEL_LINEAR_H_
#define MUSTER_PARALLEL_MODEL_LINEAR_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/gemm/linear.h"
#include "kernels/tensor.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

struct Linear {
  ParameterId weight = -1;
  std::optional<ParameterId> bias;
  // Where the outputs of the ranks are summed afterwards, only the first rank adds the bias.
  bool adds_bias = true;
};

// A linear layer of the whole model.
struct LinearSpec {
  std::string name;
  int64_t outputs = 0;
  int64_t inputs = 0;
  float stddev = 0;
  bool bias = true;
};

// Column-parallel: this rank holds the weight's rows (outputs) in `rows`, one span after another.
// kShared: all ranks of SplitShare::sharers of the heads hold the same. `in_two`: another call adds
// the other rows of the matrix. `storage_rows`: Parameter::storage_rows, 0 for as many as there
// are; the columns of padding of an output's gradient must be zero. Padding goes without a bias.
Linear AddColumnParallel(ParameterRegistry& registry, const LinearSpec& spec,
                         const std::vector<Span>& rows, const TensorShard& shard,
                         TensorSharing sharing, bool in_two = false, int64_t storage_rows = 0);
inline Linear AddColumnParallel(ParameterRegistry& registry, const LinearSpec& spec,
                                const std::vector<Span>& rows, const TensorShard& shard) {
  return AddColumnParallel(registry, spec, rows, shard, shard.sharded());
}
// Row-parallel: this rank holds the weight's columns (inputs) in `columns`. Every rank holds the
// bias, whose gradient is the same on all ranks, since each has all rows of the output's gradient.
Linear AddRowParallel(ParameterRegistry& registry, const LinearSpec& spec, Span columns,
                      const TensorShard& shard);

// y = x W^T + bias.
void LinearForward(const Pass& pass, const Linear& linear, kernels::Tensor x, kernels::Tensor y);
// y is GELU, squared ReLU or SwiGLU (kernels::Epilogue) of x W^T + bias, which is written to `pre`.
void LinearForwardThrough(const Pass& pass, const Linear& linear, kernels::Epilogue activation,
                          kernels::Tensor x, kernels::Tensor pre, kernels::Tensor y);
// sum = residual + x W^T + bias. No tensor aliases another.
void LinearForwardAdding(const Pass& pass, const Linear& linear, kernels::Tensor x,
                         kernels::Tensor residual, kernels::Tensor sum);
// y = x W^T + bias, with rotary positions applied to the first `heads` heads. x is whole sequences
// (kernels::Rotary).
void LinearForwardThroughRotary(const Pass& pass, const Linear& linear, kernels::Tensor x,
                                kernels::Tensor y, kernels::Tensor rotary, int64_t heads);
// Backward in two calls. This one computes the gradient of the input, or adds it to dx.
void LinearBackwardInput(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                         kernels::Tensor dx, bool accumulate = false);
// The gradient of `pre`, where x = activation(pre) for GELU or squared ReLU.
void LinearBackwardInputThrough(const Pass& pass, const Linear& linear,
                                kernels::Epilogue activation, kernels::Tensor dy,
                                kernels::Tensor dx, kernels::Tensor pre);
// The same where `pre` is the output of `front`, whose bias gradient it completes; squared ReLU
// requires that it has none. With `recompute`, x was not kept and is written.
void LinearBackwardInputThrough(const Pass& pass, const Linear& linear,
                                kernels::Epilogue activation, kernels::Tensor dy, kernels::Tensor x,
                                kernels::Tensor dx, kernels::Tensor pre, const Linear& front,
                                bool recompute);
// The gradient of the input, where x = silu(gate) * up of packed = [gate, up]: the gradient of
// packed overwrites packed. With `x`, x was not kept and is written. `scratch` has x's shape, and
// may be x.
void LinearBackwardInputThroughSwiglu(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                                      kernels::Tensor x, kernels::Tensor scratch,
                                      kernels::Tensor packed);
// The second call adds the gradients of weight and bias and reports them, that of the bias only if
// it is not complete.
void LinearBackwardWeights(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                           kernels::Tensor x, bool bias_is_complete = false);
// Adds `sums`, the column sums of dy, to the bias's gradient and reports it.
void LinearBackwardBias(const Pass& pass, const Linear& linear, kernels::Tensor sums);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_LINEAR_H_
