#include "parallel/optim/optimizer.h"

#include <cstring>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/memory/memory.h"

namespace muster::parallel {

using kernels::DType;
using kernels::StepOutcome;
using kernels::StepScalars;
using kernels::StepState;
using kernels::Tensor;

namespace {

template <typename T>
Tensor Bytes(T* value) {
  return Tensor(value, DType::kU8, {static_cast<int64_t>(sizeof(T))});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Optimizer>> Optimizer::Make(FlatBuffers& flat,
                                                           kernels::Device& device,
                                                           kernels::Stream& stream,
                                                           const OptimizerOptions& options) {
  std::unique_ptr<Optimizer> optimizer(new Optimizer(flat, options));
  ASSIGN_OR_RETURN(optimizer->norm_, GradientNorm::Make(flat, device, stream, options.norm));
  ASSIGN_OR_RETURN(optimizer->scalars_, device.Allocate(sizeof(StepScalars)));
  ASSIGN_OR_RETURN(optimizer->state_, device.Allocate(sizeof(StepState)));
  ASSIGN_OR_RETURN(optimizer->outcome_, device.Allocate(sizeof(StepOutcome)));
  ASSIGN_OR_RETURN(optimizer->host_state_, device.AllocateHost(sizeof(StepState)));
  RETURN_IF_ERROR(optimizer->SetState(stream, optimizer->initial_state()));
  return optimizer;
}

void Optimizer::Prepare(kernels::Stream& stream, Tensor values, int64_t micro_batches,
                        int64_t ranks, double nominal_tokens) {
  kernels::PrepareStepArgs args;
  args.values = values;
  args.micro_batches = micro_batches;
  args.ranks = ranks;
  args.nominal_tokens = nominal_tokens;
  args.clip_norm = options_.adamw.clip_norm;
  args.beta1 = options_.adamw.beta1;
  args.beta2 = options_.adamw.beta2;
  args.schedule = options_.schedule;
  args.loss_scaling = options_.loss_scaling;
  args.state = static_cast<StepState*>(state_->data());
  args.scalars = static_cast<StepScalars*>(scalars_->data());
  args.outcome = static_cast<StepOutcome*>(outcome_->data());
  kernels::PrepareStep(stream, args);
}

void Optimizer::Update(kernels::Stream& stream, const std::function<void(int bucket)>& updated) {
  const FlatLayout& layout = flat_.layout();
  const int first = flat_.options().host_buckets;
  for (int bucket = static_cast<int>(layout.buckets().size()) - 1; bucket >= first; --bucket) {
    const FlatRange part = layout.Part(bucket, flat_.options().shard);
    kernels::AdamWArgs own = flat_.update(bucket);
    own.beta1 = static_cast<float>(options_.adamw.beta1);
    own.beta2 = static_cast<float>(options_.adamw.beta2);
    own.epsilon = static_cast<float>(options_.adamw.epsilon);
    own.scalars = static_cast<const StepScalars*>(scalars_->data());
    // One call per parameter, because weight decay differs between neighbours in storage.
    for (const FlatSlice& slice : layout.Slices(part)) {
      kernels::AdamWArgs args = Rows(own, slice.flat - part.begin, slice.count);
      args.weight_decay = flat_.registry().at(slice.parameter).weight_decay
                              ? static_cast<float>(options_.adamw.weight_decay)
                              : 0.0f;
      kernels::AdamW(stream, args);
    }
    updated(bucket);
  }
}

void Optimizer::CopyOutcome(kernels::Stream& stream, StepOutcome* host) {
  kernels::Copy(stream, Bytes(static_cast<StepOutcome*>(outcome_->data())), Bytes(host));
}

const float* Optimizer::loss_scale() const {
  if (!options_.loss_scaling.dynamic) return nullptr;
  return &static_cast<const StepState*>(state_->data())->loss_scale;
}

StepState Optimizer::initial_state() const {
  StepState state;
  if (options_.loss_scaling.dynamic) {
    state.loss_scale = options_.loss_scaling.initial;
    state.hysteresis = options_.loss_scaling.hysteresis;
  }
  return state;
}

absl::Status Optimizer::SetState(kernels::Stream& stream, const StepState& state) {
  auto* host = static_cast<StepState*>(host_state_->data());
  *host = state;
  kernels::Copy(stream, Bytes(host), Bytes(static_cast<StepState*>(state_->data())));
  return stream.Synchronize();
}

absl::StatusOr<StepState> Optimizer::GetState(kernels::Stream& stream) {
  auto* host = static_cast<StepState*>(host_state_->data());
  kernels::Copy(stream, Bytes(static_cast<StepState*>(state_->data())), Bytes(host));
  RETURN_IF_ERROR(stream.Synchronize());
  return *host;
}

}  // namespace muster::parallel
