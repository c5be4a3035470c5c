// The sum of squares of a rank's own gradients, for the global norm.
#ifndef MUSTER_PARALLEL_OPTIM_GRADIENT_NORM_H_
#define MUSTER_PARALLEL_OPTIM_GRADIENT_NORM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/model/gradient_squares.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_buffers.h"

namespace muster::parallel {

// The own reduced gradients of the parameters for which `counted` holds (null: all), as contiguous
// ranges.
std::vector<kernels::Tensor> GradientSlices(FlatBuffers& flat,
                                            const std::function<bool(const Parameter&)>& counted);

struct GradientNormOptions {
  // Whether this rank counts a parameter; each must be counted by one rank. Null: it counts all.
  std::function<bool(const Parameter&)> counted;
  // GEMMs that compute weight gradients leave their sums of squares where that is fastest
  // (kernels::WeightGradient), and only the other gradients are read once more. Requires that
  // gradients stay as one backward has written them: one micro-batch on one rank,
  // Pass::overwrite_gradients, Pass::squares, and no scaling, rounding or copying. The sum has the
  // same bits in every run, but not those of a sum over flat storage
  // (kernels/gemm/weight_gradient.h), so not those of other layouts.
  bool with_gemms = false;
};

// Owns the sums that GEMMs leave. Single-threaded; the flat buffers must outlive it.
class GradientNorm {
 public:
  static absl::StatusOr<std::unique_ptr<GradientNorm>> Make(FlatBuffers& flat,
                                                            kernels::Device& device,
                                                            kernels::Stream& stream,
                                                            const GradientNormOptions& options);
  // Device memory that Make() allocates with with_gemms.
  static int64_t Bytes(const ParameterRegistry& parameters);

  // For Pass::squares; null without with_gemms.
  GradientSquares* squares() { return squares_.get(); }

  // Enqueues the sum behind backward, as the pair of kernels::SumSquaresPair. The first call finds
  // out which GEMMs leave squares.
  void Sum(kernels::Stream& stream, kernels::Tensor pair);

 private:
  GradientNorm(FlatBuffers& flat, const GradientNormOptions& options)
      : flat_(flat), options_(options) {}
  void FindInputs();

  FlatBuffers& flat_;
  const GradientNormOptions options_;
  std::unique_ptr<kernels::Buffer> pairs_;
  std::unique_ptr<GradientSquares> squares_;
  // Set by the first Sum(), when flat storage has its memory and GEMMs have been enqueued.
  bool found_ = false;
  std::vector<kernels::Tensor> large_, small_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_GRADIENT_NORM_H_
