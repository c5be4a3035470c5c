#include "parallel/optim/optimizer.h"

#include <cmath>
#include <cstddef>

#include "base/status_macros.h"

namespace muster::parallel {

using kernels::DType;
using kernels::StepScalars;
using kernels::Tensor;

namespace {

// The host writes these three, ClipCoefficient the rest.
constexpr int64_t kHostScalars = 3;
static_assert(offsetof(StepScalars, gradient_scale) == kHostScalars * sizeof(float));

Tensor Floats(kernels::Buffer& buffer, int64_t count) {
  return Tensor(buffer.data(), DType::kF32, {count});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Make(FlatBuffers& flat,
                                                           kernels::Device& device,
                                                           const AdamWConfig& config) {
  std::unique_ptr<Optimizer> optimizer(new Optimizer(flat, config));
  ASSIGN_OR_RETURN(optimizer->square_sum_, device.Allocate(sizeof(float)));
  ASSIGN_OR_RETURN(optimizer->norm_, device.Allocate(sizeof(float)));
  ASSIGN_OR_RETURN(optimizer->scalars_, device.Allocate(sizeof(StepScalars)));
  ASSIGN_OR_RETURN(optimizer->host_norm_, device.AllocateHost(sizeof(float)));
  ASSIGN_OR_RETURN(optimizer->host_scalars_, device.AllocateHost(kHostScalars * sizeof(float)));
  return optimizer;
}

void Optimizer::ComputeNorm(kernels::Stream& stream) {
  kernels::SumSquares(stream, flat_.gradient(0, {0, flat_.layout().elements()}),
                      Floats(*square_sum_, 1), /*accumulate=*/false);
  kernels::ClipCoefficient(stream, Floats(*square_sum_, 1), static_cast<float>(config_.clip_norm),
                           Floats(*norm_, 1), static_cast<StepScalars*>(scalars_->data()));
  kernels::Copy(stream, Floats(*norm_, 1), Floats(*host_norm_, 1));
}

void Optimizer::Update(kernels::Stream& stream, int64_t step, double learning_rate) {
  auto* scalars = static_cast<float*>(host_scalars_->data());
  scalars[0] = static_cast<float>(learning_rate);
  scalars[1] = static_cast<float>(1.0 - std::pow(config_.beta1, static_cast<double>(step)));
  scalars[2] = static_cast<float>(1.0 - std::pow(config_.beta2, static_cast<double>(step)));
  kernels::Copy(stream, Floats(*host_scalars_, kHostScalars), Floats(*scalars_, kHostScalars));

  kernels::AdamWArgs args;
  args.beta1 = static_cast<float>(config_.beta1);
  args.beta2 = static_cast<float>(config_.beta2);
  args.epsilon = static_cast<float>(config_.epsilon);
  args.scalars = static_cast<const StepScalars*>(scalars_->data());
  const ParameterRegistry& registry = flat_.registry();
  // One call per parameter, because weight decay differs between neighbours in storage.
  for (ParameterId id = 0; id < registry.size(); ++id) {
    const int64_t begin = flat_.layout().offset(id);
    const FlatRange range = {begin, begin + registry.at(id).elements()};
    args.parameter = flat_.parameter(range);
    args.gradient = flat_.gradient(0, range);
    args.m = flat_.m(range);
    args.v = flat_.v(range);
    args.weight_decay =
        registry.at(id).weight_decay ? static_cast<float>(config_.weight_decay) : 0.0f;
    kernels::AdamW(stream, args);
  }
}

}  // namespace muster::parallel
