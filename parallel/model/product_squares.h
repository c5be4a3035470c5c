// Sums of squares that the products leave which compute gradients of weights: between the layers,
// which have them computed, and the global norm, which adds them up.
#ifndef MUSTER_PARALLEL_MODEL_PRODUCT_SQUARES_H_
#define MUSTER_PARALLEL_MODEL_PRODUCT_SQUARES_H_

#include <cstdint>
#include <utility>
#include <vector>

#include "base/check.h"
#include "kernels/tensor.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

// Of the parameters that are Parameter::by_product. Views, owns no device memory. Single-threaded.
class ProductSquares {
 public:
  // Per parameter [kernels::kSquareParts,2] fp32, empty for others.
  explicit ProductSquares(std::vector<kernels::Tensor> pairs)
      : left_(pairs.size(), Left::kUnknown), pairs_(std::move(pairs)) {}

  const kernels::Tensor& pairs(ParameterId id) const { return pairs_[id]; }
  // Whether the product leaves its squares (kernels::WeightGradient). Where it does not, the
  // gradient has to be read once more. Requires: the same in every step, since pairs that are not
  // written again would count in the norms of later ones.
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

#endif  // MUSTER_PARALLEL_MODEL_PRODUCT_SQUARES_H_
