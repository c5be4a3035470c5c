// Sums of squares of weight gradients, which the epilogues of the GEMMs that compute them leave for
// the global norm.
#ifndef MUSTER_PARALLEL_MODEL_GRADIENT_SQUARES_H_
#define MUSTER_PARALLEL_MODEL_GRADIENT_SQUARES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/tensor.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

// Covers the parameters with Parameter::by_gemm. Views; owns no device memory. Single-threaded.
class GradientSquares {
 public:
  // Per parameter [kernels::kSquareParts,2] fp32; empty for the others.
  explicit GradientSquares(std::vector<kernels::Tensor> pairs)
      : left_(pairs.size(), Left::kUnknown), pairs_(std::move(pairs)) {}

  const kernels::Tensor& pairs(ParameterId id) const { return pairs_[id]; }
  // Whether the GEMM leaves the squares of this parameter's gradient (kernels::WeightGradient). If
  // not, the norm reads the gradient. Requires: the same answer in every step, since sums that are
  // not written again would count in the norms of later steps.
  void SetLeft(ParameterId id, bool left) {
    const Left now = left ? Left::kYes : Left::kNo;
    CHECK(left_[id] == Left::kUnknown || left_[id] == now)
        << "parameter " << id << " is computed in another way than in the steps before";
    left_[id] = now;
  }
  bool left(ParameterId id) const { return left_[id] == Left::kYes; }

 private:
  enum class Left : uint8_t { kUnknown, kNo, kYes };

  std::vector<Left> left_;
  std::vector<kernels::Tensor> pairs_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_GRADIENT_SQUARES_H_
