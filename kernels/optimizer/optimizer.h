// The end of a training step: clipping, learning rate, loss scale and AdamW. Every scalar is in
// device memory, so that no step waits for the host. kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_OPTIMIZER_OPTIMIZER_H_
#define MUSTER_KERNELS_OPTIMIZER_OPTIMIZER_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// Scalars of one step.
struct StepScalars {
  float learning_rate;
  float beta1_correction;  // 1 - beta1^step
  float beta2_correction;
  float gradient_scale;  // clip coefficient; multiplied into every gradient
  int32_t skip;          // 1: the step is not applied (overflow)
};
// gradient_scale = min(1, clip_norm / (norm + 1e-6)), or 1 when clip_norm is 0; skip = 1 when the
// norm is not finite. square_sum [1] fp32 in, norm [1] fp32 out.
void ClipCoefficient(Stream& stream, Tensor square_sum, float clip_norm, Tensor norm,
                     StepScalars* scalars);

// Learning rate of update 1, 2, ...: linear warm-up from 0 to the peak, then as `decay` says.
struct LearningRateSchedule {
  enum class Decay { kConstant, kCosine, kLinear };
  Decay decay = Decay::kConstant;
  double peak = 0;
  double minimum = 0;        // not used by kConstant
  int64_t warmup_steps = 0;  // peak * update / warmup_steps
  int64_t decay_steps = 0;   // the minimum is reached here and kept
};
// Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740), with hysteresis.
struct LossScaling {
  bool dynamic = false;
  float initial = 1;
  float growth = 2;  // after growth_interval steps without overflow
  int32_t growth_interval = 1000;
  float backoff = 0.5f;
  float minimum = 1;
  int32_t hysteresis = 2;  // overflows before the scale shrinks
};
// State that a step leaves to the next, in device memory.
struct StepState {
  int64_t updates = 0;  // optimizer steps applied; skipped ones do not count
  float loss_scale = 1;
  int32_t clean_steps = 0;  // since the last overflow or growth
  int32_t hysteresis = 0;   // overflows left before the scale shrinks
};
// The result of a step, for the host to read.
struct StepOutcome {
  double loss = 0;           // nats per token
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  double tokens = 0;
  float loss_scale = 1;  // of this step
  int32_t stop = 0;      // a rank has asked to stop
  int32_t skipped = 0;   // loss or norm was not finite: no update
  StepState state;       // after the step
};
// Computes all scalars of a step on the device.
struct PrepareStepArgs {
  // fp32: the loss (sum over tokens) of every micro-batch of the global batch, the tokens of each,
  // the stop vote, and one pair of SumSquaresPair per rank.
  Tensor values;  // [2 * micro_batches + 1 + 2 * ranks]
  int64_t micro_batches = 0;
  int64_t ranks = 0;
  // The tokens that losses and gradients were divided by; the scalars correct for the real number.
  double nominal_tokens = 1;
  double clip_norm = 0;  // 0: off
  double beta1 = 0, beta2 = 0;
  LearningRateSchedule schedule;
  LossScaling loss_scaling;
  StepState* state = nullptr;      // device memory, updated
  StepScalars* scalars = nullptr;  // device memory, written
  StepOutcome* outcome = nullptr;  // device memory, written
};
void PrepareStep(Stream& stream, const PrepareStepArgs& args);

// AdamW (Loshchilov and Hutter, arXiv 1711.05101) over n elements of flat storage, with fp32 state.
// Every multiplication, sum, root and quotient is rounded on its own, so that host and device agree
// to the bit.
struct AdamWArgs {
  Tensor parameter;  // [n] fp32 master weight, updated; empty with `lower`
  Tensor gradient;   // [n] fp32
  Tensor m, v;       // [n] fp32, updated
  Tensor copy;       // [n] bf16 (rounded as by SplitMaster) or fp16 copy of the parameter, or empty
  Tensor lower;      // [n] u16, updated: the master weight is `copy` and this; or empty
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f, weight_decay = 0;
  const StepScalars* scalars = nullptr;  // device memory
};
void AdamW(Stream& stream, const AdamWArgs& args);

// Splits a fp32 master weight into the bf16 value that the model computes with and 16 more bits;
// together they are the 32 bits of the master. `upper` is the master rounded to nearest, ties away
// from zero (with ties to even, one pair could mean two masters); `lower` is the master's lower 16
// bits, whose highest bit is set exactly when `upper` was rounded up. Values beyond the largest
// bf16 are infinite in `upper` and are restored exactly; of a NaN only its sign is kept. With an
// empty `lower` only `upper` is written. On CUDA any of the tensors may be in pinned host memory.
void SplitMaster(Stream& stream, Tensor master, Tensor upper, Tensor lower);
void JoinMaster(Stream& stream, Tensor upper, Tensor lower, Tensor master);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_OPTIMIZER_OPTIMIZER_H_
