// The tail of a step: global norm, clipping, loss scale and AdamW over flat storage.
#ifndef MUSTER_PARALLEL_OPTIM_OPTIMIZER_H_
#define MUSTER_PARALLEL_OPTIM_OPTIMIZER_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/optimizer/optimizer.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/gradient_norm.h"
#include "parallel/optim/schedule.h"

namespace muster::parallel {

struct AdamWConfig {
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.1;
  double clip_norm = 1.0;  // 0 = off
};

struct OptimizerOptions {
  AdamWConfig adamw;
  Schedule schedule;
  kernels::LossScaling loss_scaling;
  GradientNormOptions norm;
};

// Updates the own parts of the flat buffers from the reduced gradients. All scalars of the step
// stay in device memory, so a step does not wait for the host. Single-threaded.
class Optimizer {
 public:
  static absl::StatusOr<std::unique_ptr<Optimizer>> Make(FlatBuffers& flat, kernels::Device& device,
                                                         kernels::Stream& stream,
                                                         const OptimizerOptions& options);

  // Device memory that Make() allocates for the scalars of a step, besides GradientNorm::Bytes.
  static constexpr int64_t kBytes =
      sizeof(kernels::StepScalars) + sizeof(kernels::StepState) + sizeof(kernels::StepOutcome);

  // Enqueues the sum of squares of the own gradients that are counted, as the pair of
  // kernels::SumSquaresPair.
  void SumSquares(kernels::Stream& stream, kernels::Tensor pair) { norm_->Sum(stream, pair); }
  // For Pass::squares; null unless GEMMs leave sums of squares (GradientNormOptions).
  GradientSquares* squares() { return norm_->squares(); }
  // Enqueues norm, clip coefficient, learning rate, loss scale and the verdict on the step.
  // `values` as in kernels::PrepareStepArgs.
  void Prepare(kernels::Stream& stream, kernels::Tensor values, int64_t micro_batches,
               int64_t ranks, double nominal_tokens);
  // Enqueues the update, later buckets first (the order of forward), and calls `updated` with each
  // bucket when the update of its own part is enqueued. Skips buckets whose state is on the host.
  void Update(kernels::Stream& stream, const std::function<void(int bucket)>& updated);

  // Enqueues a copy of the results of Prepare() to pinned host memory.
  void CopyOutcome(kernels::Stream& stream, kernels::StepOutcome* host);
  // The results of Prepare() in device memory, for updates elsewhere.
  const kernels::StepScalars* scalars() const {
    return static_cast<const kernels::StepScalars*>(scalars_->data());
  }
  const OptimizerOptions& options() const { return options_; }
  // The factor of every loss in device memory, or null without dynamic loss scaling.
  const float* loss_scale() const;

  // The state at the beginning of a run, or of a restored one. Blocks.
  absl::Status SetState(kernels::Stream& stream, const kernels::StepState& state);
  absl::StatusOr<kernels::StepState> GetState(kernels::Stream& stream);
  kernels::StepState initial_state() const;

 private:
  Optimizer(FlatBuffers& flat, const OptimizerOptions& options) : flat_(flat), options_(options) {}

  FlatBuffers& flat_;
  const OptimizerOptions options_;
  std::unique_ptr<GradientNorm> norm_;
  std::unique_ptr<kernels::Buffer> scalars_, state_, outcome_, host_state_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_OPTIMIZER_H_
