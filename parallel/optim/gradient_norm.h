// The sum of squares of a rank's own gradients, of which the global norm is made.
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

// Own reduced gradients of the parameters for which `counted` holds (null: of all), in as few
// pieces as they stand side by side.
std::vector<kernels::Tensor> GradientPieces(FlatBuffers& flat,
                                            const std::function<bool(const Parameter&)>& counted);

struct GradientNormOptions {
  // Whether this rank counts a parameter, each of which must appear once. Null: all of them.
  std::function<bool(const Parameter&)> counted;
  // The products that compute gradients of weights leave their sums of squares where that is the
  // fastest (kernels::WeightGradient), and only the other gradients are read once more. Requires
  // that gradients are what one backward has written: one micro-batch on one rank,
  // Pass::overwrite_gradients, Pass::squares, and nobody scales, rounds or moves them. The sum has
  // the same bits in every run, but not those of a sum over flat storage
  // (kernels/gemm/weight_gradient.h), so not those of other layouts.
  bool with_gemms = false;
};

// Owns the products' sums. Single-threaded; the flat buffers must outlive it.
class GradientNorm {
 public:
  static absl::StatusOr<std::unique_ptr<GradientNorm>> Make(FlatBuffers& flat,
                                                            kernels::Device& device,
                                                            kernels::Stream& stream,
                                                            const GradientNormOptions& options);
  // What Make() will ask the device for, with_gemms.
  static int64_t Bytes(const ParameterRegistry& parameters);

  // For Pass::squares; null without products.
  GradientSquares* squares() { return squares_.get(); }

  // Enqueues the sum, as the pair of kernels::SumSquaresPair, behind the backward. Which products
  // have left squares is asked once, the first time.
  void Sum(kernels::Stream& stream, kernels::Tensor pair);

 private:
  GradientNorm(FlatBuffers& flat, const GradientNormOptions& options)
      : flat_(flat), options_(options) {}
  void FindInputs();

  FlatBuffers& flat_;
  const GradientNormOptions options_;
  std::unique_ptr<kernels::Buffer> pairs_;
  std::unique_ptr<GradientSquares> squares_;
  // Since the first Sum(): flat storage has its memory by then, and products have been enqueued.
  bool found_ = false;
  std::vector<kernels::Tensor> large_, small_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_GRADIENT_NORM_H_
