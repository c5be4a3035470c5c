// Layer norm or RMS norm: its parameters, what it keeps for backward, forward and backward.
#ifndef MUSTER_PARALLEL_MODEL_NORM_H_
#define MUSTER_PARALLEL_MODEL_NORM_H_

#include <array>
#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "kernels/arena.h"
#include "kernels/tensor.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

// A vector parameter without weight decay.
ParameterId AddVector(ParameterRegistry& registry, const std::string& name, int64_t size,
                      Initializer initializer, TensorSharing sharing = TensorSharing::kReplicated);

// Reports to the listener of a pass, if there is one, that this gradient is complete.
void Ready(const Pass& pass, ParameterId parameter);

enum class NormKind { kLayer, kRms };
struct NormSpec {
  NormKind kind = NormKind::kLayer;
  float epsilon = 1e-5f;
};

struct Norm {
  NormSpec spec;
  ParameterId weight = -1;
  ParameterId bias = -1;  // layer norm only
};
// Registers NAME.weight (ones) and, for a layer norm, NAME.bias (zeros), both [width].
Norm AddNorm(ParameterRegistry& registry, const std::string& name, int64_t width,
             const NormSpec& spec, TensorSharing sharing = TensorSharing::kReplicated);

// The normalised input and what its backward needs.
struct NormSaved {
  kernels::Tensor x, y, mean, rstd;  // no mean with RMS norm

  static NormSaved Take(kernels::Arena& arena, kernels::DType activation, const Norm& norm,
                        int64_t rows, int64_t width);
  // Take the tensors in arena memory of `category`.
  void TakeInput(kernels::Arena& arena, const std::string& category, kernels::DType activation,
                 int64_t rows, int64_t width);
  void TakeOutput(kernels::Arena& arena, const std::string& category, kernels::DType activation,
                  int64_t rows, int64_t width);
  void TakeStatistics(kernels::Arena& arena, const std::string& category, const Norm& norm,
                      int64_t rows);
  // The views of slice `slice` of `slices` of the rows.
  NormSaved Slice(int slices, int slice) const;
};

// The gradients of the parameters of one micro-batch.
struct NormGradients {
  kernels::Tensor weight;  // [width] fp32
  kernels::Tensor bias;    // the same, layer norm only

  static NormGradients Take(kernels::Arena& arena, const std::string& category, const Norm& norm,
                            int64_t width);
};

// x = residual + branch becomes the residual stream, and y is its norm. Handles all rows, with
// half-batches or without.
void NormForward(const Pass& pass, const Norm& norm, ForwardState& state, const NormSaved& saved);
// The same for some rows. Without a branch the norm's input is the residual stream, and x is not
// written.
void NormForward(const Pass& pass, const Norm& norm, kernels::Tensor residual,
                 kernels::Tensor branch, const NormSaved& saved);
// d_hidden += the gradient through the norm, whose input was `x`. `d_bias` [width] fp32, unless
// empty, is the gradient of the bias of the layer that was added to the residual stream in front of
// the norm; it is added to like the norm's own. BackwardState::d_hidden_sums is written where
// d_bias is empty and the state has it.
void NormBackward(const Pass& pass, const Norm& norm, kernels::Tensor dy, kernels::Tensor x,
                  const NormSaved& saved, BackwardState& state, kernels::Tensor d_bias = {});
// The same for two half-batches, each when its dy has arrived; `behind` is called after each.
void NormBackwardInSlices(const Pass& pass, const Norm& norm, const std::array<Started, 2>& dy,
                          kernels::Tensor x, const NormSaved& saved, kernels::Tensor d_hidden,
                          absl::FunctionRef<void(int slice)> behind);
// The same in two calls. The first computes the parameters' gradients in the same pass over memory
// as that of the input and leaves them in `gradients`; the second adds them to the parameters'
// gradients.
void NormBackwardInput(const Pass& pass, const Norm& norm, kernels::Tensor dy, kernels::Tensor x,
                       const NormSaved& saved, kernels::Tensor d_hidden,
                       const NormGradients& gradients);
void NormBackwardWeights(const Pass& pass, const Norm& norm, const NormGradients& gradients);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_NORM_H_
