// The arithmetic of the scalars of a step (optimizer.h), the same on host and device. One thread
// does it.
#ifndef MUSTER_KERNELS_OPTIMIZER_STEP_MATH_H_
#define MUSTER_KERNELS_OPTIMIZER_STEP_MATH_H_

#include <cmath>
#include <cstdint>

#include "kernels/optimizer/optimizer.h"
#include "kernels/portable.h"

namespace muster::kernels {

MUSTER_HOST_DEVICE inline double LearningRateAt(const LearningRateSchedule& schedule,
                                                int64_t update) {
  if (update < schedule.warmup_steps) {
    return schedule.peak * static_cast<double>(update) / static_cast<double>(schedule.warmup_steps);
  }
  if (schedule.decay == LearningRateSchedule::Decay::kConstant) return schedule.peak;
  const int64_t span = schedule.decay_steps - schedule.warmup_steps;
  double progress = 1.0;
  if (span > 0 && update < schedule.decay_steps) {
    progress = static_cast<double>(update - schedule.warmup_steps) / static_cast<double>(span);
  }
  constexpr double kPi = 3.14159265358979323846;
  const double remaining = schedule.decay == LearningRateSchedule::Decay::kCosine
                               ? 0.5 * (1.0 + cos(kPi * progress))
                               : 1.0 - progress;
  return schedule.minimum + (schedule.peak - schedule.minimum) * remaining;
}

// std::isfinite cannot be called from device code.
MUSTER_HOST_DEVICE inline bool IsFinite(double x) { return x - x == 0; }

// load(0), load(1), ... added as one binary tree over that order: subtrees of equal size merge at
// once, like the digits of a binary counter. At most 2^31 - 1 of them.
template <typename Load>
MUSTER_HOST_DEVICE inline float SumAsTree(int64_t count, Load load) {
  float levels[32];
  levels[0] = 0;
  int depth = 0;
  for (int64_t k = 0; k < count; ++k) {
    levels[depth++] = load(k);
    for (int64_t bits = k; (bits & 1) != 0; bits >>= 1) {
      levels[depth - 2] += levels[depth - 1];
      --depth;
    }
  }
  for (; depth > 1; --depth) levels[depth - 2] += levels[depth - 1];
  return levels[0];
}

// Far more than gradients in fp16 (up to 65504) allow. Where all gradients are zero, nothing else
// would end the growth before infinity, which no halving makes finite again.
inline constexpr float kLossScaleMax = 0x1p40f;

// Megatron-LM's rule: an overflow reduces the hysteresis by one; once that is used up, every
// overflow shrinks the scale, until a growth restores the hysteresis.
MUSTER_HOST_DEVICE inline void UpdateLossScale(const LossScaling& scaling, bool overflow,
                                               StepState& state) {
  if (!scaling.dynamic) return;
  if (overflow) {
    state.clean_steps = 0;
    if (--state.hysteresis > 0) return;
    const float smaller = state.loss_scale * scaling.backoff;
    state.loss_scale = smaller > scaling.minimum ? smaller : scaling.minimum;
  } else if (++state.clean_steps >= scaling.growth_interval) {
    state.clean_steps = 0;
    state.hysteresis = scaling.hysteresis;
    const float larger = state.loss_scale * scaling.growth;
    state.loss_scale = larger < kLossScaleMax ? larger : kLossScaleMax;
  }
}

// `value` is the data of args.values.
MUSTER_HOST_DEVICE inline void PrepareStepOn(const PrepareStepArgs& args, const float* value) {
  double loss = 0, tokens = 0, square = 0;
  for (int64_t i = 0; i < args.micro_batches; ++i) loss += value[i];
  value += args.micro_batches;
  for (int64_t i = 0; i < args.micro_batches; ++i) tokens += value[i];
  value += args.micro_batches;
  const float stop = *value++;
  for (int64_t i = 0; i < args.ranks; ++i) {
    square += static_cast<double>(value[2 * i]) + static_cast<double>(value[2 * i + 1]);
  }
  StepState& state = *args.state;
  const float loss_scale = state.loss_scale;
  const double unscale = args.nominal_tokens / tokens / loss_scale;
  // Rounded, so that it is the same however the sum was split over ranks.
  const auto norm = static_cast<float>(sqrt(square) * unscale);
  loss /= tokens;
  // Also false without any token: 0 / 0.
  const bool finite = IsFinite(norm) && IsFinite(loss);
  if (finite) ++state.updates;
  const auto update = static_cast<double>(state.updates);
  const double clip =
      args.clip_norm > 0 && finite ? fmin(1.0, args.clip_norm / (norm + 1e-6)) : 1.0;
  const double learning_rate = LearningRateAt(args.schedule, state.updates);
  StepScalars& scalars = *args.scalars;
  scalars.learning_rate = static_cast<float>(learning_rate);
  scalars.beta1_correction = static_cast<float>(1.0 - pow(args.beta1, update));
  scalars.beta2_correction = static_cast<float>(1.0 - pow(args.beta2, update));
  scalars.gradient_scale = static_cast<float>(unscale * clip);
  scalars.skip = finite ? 0 : 1;
  UpdateLossScale(args.loss_scaling, !finite, state);
  StepOutcome& outcome = *args.outcome;
  outcome.loss = loss;
  outcome.gradient_norm = norm;
  outcome.learning_rate = learning_rate;
  outcome.tokens = tokens;
  outcome.loss_scale = loss_scale;
  outcome.stop = stop != 0.0f ? 1 : 0;
  outcome.skipped = scalars.skip;
  outcome.state = state;
}

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_OPTIMIZER_STEP_MATH_H_
