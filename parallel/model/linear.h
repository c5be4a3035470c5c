// Linear layers with their parameters, whole or this rank's part of them (tensor_parallel.h).
#ifndef MUSTER_PARALLEL_MODEL_LINEAR_H_
#define MUSTER_PARALLEL_MODEL_LINEAR_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

struct Linear {
  ParameterId weight = -1;
  std::optional<ParameterId> bias;
  // False on all ranks but the first where the outputs of the ranks are summed afterwards.
  bool adds_bias = true;
};

// What a linear layer is in the whole model.
struct LinearSpec {
  std::string name;
  int64_t outputs = 0;
  int64_t inputs = 0;
  float stddev = 0;
  bool bias = true;
};

// This rank holds the rows (outputs) in `rows`, one span after another. kShared: so do all ranks of
// part.kv_sharers. `in_two`: of a matrix whose other rows are added by another call.
Linear AddColumnParallel(ParameterRegistry& registry, const LinearSpec& spec,
                         const std::vector<Span>& rows, const TensorPart& part,
                         TensorSharing sharing, bool in_two = false);
inline Linear AddColumnParallel(ParameterRegistry& registry, const LinearSpec& spec,
                                const std::vector<Span>& rows, const TensorPart& part) {
  return AddColumnParallel(registry, spec, rows, part, part.sharded());
}
// This rank holds the columns (inputs) in `columns`; every rank holds the bias. Its gradient is the
// same on all ranks, since each sees the gradient of all rows of the output.
Linear AddRowParallel(ParameterRegistry& registry, const LinearSpec& spec, Span columns,
                      const TensorPart& part);

// y = x W^T + bias. With `pre`, y is the GELU of that, which is kept in `pre`.
void LinearForward(const Pass& pass, const Linear& linear, kernels::Tensor x, kernels::Tensor y,
                   kernels::Tensor pre = kernels::Tensor());
// y = silu(gate) up of packed = [gate, up] = x W^T + bias, which is kept.
void LinearForwardThroughSwiglu(const Pass& pass, const Linear& linear, kernels::Tensor x,
                                kernels::Tensor packed, kernels::Tensor y);
// sum = residual + x W^T + bias, of the whole product. They do not alias.
void LinearForwardAdding(const Pass& pass, const Linear& linear, kernels::Tensor x,
                         kernels::Tensor residual, kernels::Tensor sum);
// y = x W^T + bias, whose first `heads` heads are turned by `rotary`, of whole sequences
// (kernels::Rotary).
void LinearForwardThroughRotary(const Pass& pass, const Linear& linear, kernels::Tensor x,
                                kernels::Tensor y, kernels::Tensor rotary, int64_t heads);
// Backward in two calls. The first is the gradient of the input only, with `pre` times gelu'(pre).
void LinearBackwardInput(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                         kernels::Tensor dx, kernels::Tensor pre = kernels::Tensor());
// The same with `pre` as the output of `front`, whose bias gradient is complete afterwards. With
// `recompute`, x = gelu(pre) has not been kept and is written.
void LinearBackwardInputThroughGelu(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                                    kernels::Tensor x, kernels::Tensor dx, kernels::Tensor pre,
                                    const Linear& front, bool recompute);
// The gradient of the input only, with x = silu(gate) up of packed = [gate, up]: the gradient of
// that takes its place. Unless `x` is empty, it has not been kept and is written. `scratch` is
// like x, and may be x.
void LinearBackwardInputThroughSwiglu(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                                      kernels::Tensor x, kernels::Tensor scratch,
                                      kernels::Tensor packed);
// The second adds and reports those of weight and bias, the bias's only when it is not complete.
void LinearBackwardWeights(const Pass& pass, const Linear& linear, kernels::Tensor dy,
                           kernels::Tensor x, bool bias_is_complete = false);
// Adds `sums`, those of dy's columns, and reports the bias's gradient.
void LinearBackwardBias(const Pass& pass, const Linear& linear, kernels::Tensor sums);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_LINEAR_H_
