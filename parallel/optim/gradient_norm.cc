#include "parallel/optim/gradient_norm.h"

#include <set>
#include <utility>

#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/gemm/weight_gradient.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::DType;
using kernels::kSquareParts;
using kernels::Tensor;

namespace {

constexpr int64_t kFloat = sizeof(float);
// Elements that one thread block adds up in about the time of a launch.
constexpr int64_t kSmall = int64_t{1} << 17;

int64_t ByGemm(const ParameterRegistry& parameters) {
  int64_t count = 0;
  for (ParameterId id = 0; id < parameters.size(); ++id) count += parameters.at(id).by_gemm;
  return count;
}

}  // namespace

std::vector<Tensor> GradientSlices(FlatBuffers& flat,
                                   const std::function<bool(const Parameter&)>& counted) {
  const FlatLayout& layout = flat.layout();
  std::vector<Tensor> slices;
  // Adjacent parameters are one range.
  const auto add = [&](const Tensor& next) {
    if (!slices.empty()) {
      Tensor& last = slices.back();
      if (last.f32() + last.elements() == next.f32()) {
        last = Tensor(last.data(), DType::kF32, {last.elements() + next.elements()});
        return;
      }
    }
    slices.push_back(next);
  };
  for (int bucket = 0; bucket < static_cast<int>(layout.buckets().size()); ++bucket) {
    const Tensor own = flat.own_gradient(bucket);
    // Includes the padding where it is zero.
    bool all = !flat.options().share_gradients;
    for (const ParameterId id : layout.buckets()[bucket].parameters) {
      all = all && (counted == nullptr || counted(flat.registry().at(id)));
    }
    if (all) {
      add(own);
      continue;
    }
    const FlatRange part = layout.Part(bucket, flat.options().shard);
    for (const FlatSlice& slice : layout.Slices(part)) {
      if (counted != nullptr && !counted(flat.registry().at(slice.parameter))) continue;
      add(own.Rows(slice.flat - part.begin, slice.count));
    }
  }
  return slices;
}

int64_t GradientNorm::Bytes(const ParameterRegistry& parameters) {
  return ByGemm(parameters) * 2 * kSquareParts * kFloat;
}

absl::StatusOr<std::unique_ptr<GradientNorm>> GradientNorm::Make(
    FlatBuffers& flat, kernels::Device& device, kernels::Stream& stream,
    const GradientNormOptions& options) {
  std::unique_ptr<GradientNorm> norm(new GradientNorm(flat, options));
  const ParameterRegistry& parameters = flat.registry();
  if (!options.with_gemms || ByGemm(parameters) == 0) return norm;
  ASSIGN_OR_RETURN(norm->pairs_, device.Allocate(Bytes(parameters)));
  auto* at = static_cast<float*>(norm->pairs_->data());
  // Sums that no GEMM writes stay zero.
  kernels::Zero(stream, Tensor(at, DType::kF32, {norm->pairs_->bytes() / kFloat}));
  std::vector<Tensor> pairs(parameters.size());
  for (ParameterId id = 0; id < parameters.size(); ++id) {
    if (!parameters.at(id).by_gemm) continue;
    pairs[id] = Tensor(at, DType::kF32, {kSquareParts, 2});
    at += 2 * kSquareParts;
  }
  norm->squares_ = std::make_unique<GradientSquares>(std::move(pairs));
  return norm;
}

void GradientNorm::FindInputs() {
  found_ = true;
  std::set<const Parameter*> left;
  const ParameterRegistry& parameters = flat_.registry();
  for (ParameterId id = 0; squares_ != nullptr && id < parameters.size(); ++id) {
    if (squares_->left(id)) left.insert(&parameters.at(id));
  }
  for (const Tensor& slice : GradientSlices(flat_, [&](const Parameter& parameter) {
         return left.count(&parameter) == 0 &&
                (options_.counted == nullptr || options_.counted(parameter));
       })) {
    // Without GEMM sums, ranges are in the order of flat storage, on which the bits depend.
    const bool small = squares_ != nullptr && slice.elements() <= kSmall;
    (small ? small_ : large_).push_back(slice);
  }
}

void GradientNorm::Sum(kernels::Stream& stream, Tensor pair) {
  if (!found_) FindInputs();
  kernels::Zero(stream, pair);
  if (squares_ != nullptr) {
    const Tensor pairs(pairs_->data(), DType::kF32, {pairs_->bytes() / (2 * kFloat), 2});
    kernels::SumPairs(stream, pairs, pair, /*accumulate=*/true);
    if (!small_.empty()) kernels::SumSquaresPair(stream, small_, pair, /*accumulate=*/true);
  }
  for (const Tensor& input : large_) {
    kernels::SumSquaresPair(stream, input, pair, /*accumulate=*/true);
  }
}

}  // namespace muster::parallel
