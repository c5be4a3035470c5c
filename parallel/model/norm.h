// Layer norm or RMS norm with its parameters and what it keeps, as blocks use it.
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

// Tells the listener of a pass, if there is one, that this gradient is complete.
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
  // The parts of it, in memory of `category`.
  void TakeInput(kernels::Arena& arena, const std::string& category, kernels::DType activation,
                 int64_t rows, int64_t width);
  void TakeOutput(kernels::Arena& arena, const std::string& category, kernels::DType activation,
                  int64_t rows, int64_t width);
  void TakeStatistics(kernels::Arena& arena, const std::string& category, const Norm& norm,
                      int64_t rows);
  // Of one of `pieces` of the rows.
  NormSaved Piece(int pieces, int piece) const;
};

// One micro-batch's gradients of the parameters.
struct NormGradients {
  kernels::Tensor weight;  // [width] fp32
  kernels::Tensor bias;    // the same, layer norm only

  static NormGradients Take(kernels::Arena& arena, const std::string& category, const Norm& norm,
                            int64_t width);
};

// x = residual + branch becomes the new residual stream; y is its norm. Of all rows, in halves or
// not.
void NormForward(const Pass& pass, const Norm& norm, Flow& flow, const NormSaved& saved);
// The same of some rows; without a branch the norm's input is the residual stream, and x is not
// written.
void NormForward(const Pass& pass, const Norm& norm, kernels::Tensor residual,
                 kernels::Tensor branch, const NormSaved& saved);
// d_hidden += the gradient through the norm. `x` is what was normalised. `d_bias`, unless empty: of
// what was added to the residual stream in front of it, [width] fp32, added to like the norm's.
// Flow::d_hidden_sums is written where d_bias is empty and the flow has it.
void NormBackward(const Pass& pass, const Norm& norm, kernels::Tensor dy, kernels::Tensor x,
                  const NormSaved& saved, Flow& flow, kernels::Tensor d_bias = {});
// The same of rows that come in two pieces, each once its dy is there; `behind` is called after
// each.
void NormBackwardInPieces(const Pass& pass, const Norm& norm, const std::array<Started, 2>& dy,
                          kernels::Tensor x, const NormSaved& saved, kernels::Tensor d_hidden,
                          absl::FunctionRef<void(int piece)> behind);
// The same in two calls: the parameters' gradients, which come with that of the input in one pass
// over memory, are left in `gradients`, and added to where they belong later.
void NormBackwardInput(const Pass& pass, const Norm& norm, kernels::Tensor dy, kernels::Tensor x,
                       const NormSaved& saved, kernels::Tensor d_hidden,
                       const NormGradients& gradients);
void NormBackwardWeights(const Pass& pass, const Norm& norm, const NormGradients& gradients);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_NORM_H_
