// One training step after the other.
#ifndef MUSTER_PARALLEL_TRAIN_TRAINING_STEP_H_
#define MUSTER_PARALLEL_TRAIN_TRAINING_STEP_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/device/replay.h"
#include "kernels/device/trace.h"
#include "kernels/optimizer/optimizer.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/optimizer_offload.h"
#include "parallel/train/batch_loader.h"
#include "parallel/train/gradient_reduction.h"
#include "parallel/train/inputs.h"
#include "parallel/train/metered_groups.h"
#include "parallel/train/model_runner.h"
#include "parallel/train/rank_memory.h"

namespace muster::parallel {

// How far training has come.
struct TrainingPosition {
  int64_t step = 0;  // finished
  int64_t consumed_samples = 0;
};

// Owns the optimizer, the batch loader and the steps that are under way.
//
// A step: forward and backward of every micro-batch, with gradients being reduced under backward;
// then one small all-reduce over all ranks of (loss and token count of every micro-batch of the
// global batch, stop vote, square sum of every rank's own gradients); then norm, clip, loss scale,
// learning rate and AdamW. Losses are exchanged one by one and summed in the same order everywhere,
// so all ranks report the same bits, in every layout. A square sum travels as a pair of fp32 that
// keeps 48 bits, so the norm does not depend on how gradients are sharded; SumsInGemms
// (memory.h) is the exception, for one rank whose additions may be made in any order.
//
// Nothing in a step waits for the host: scalars are computed on the device, and the host reads the
// outcome of a step when it has enqueued steps_under_way() - 1 more (on the host device at once). A
// step whose loss or norm is not finite changes nothing on the device. The run ends when the host
// learns of it, except in fp16, where the loss scale is lowered and training goes on.
//
// Single-threaded; the arguments must outlive it. Statuses are marked with a FailureDomain.
class TrainingStep {
 public:
  // Whether steps are recorded and replayed: ModelRunner::Make's `record`.
  static bool Records(const TrainerInputs& inputs, RankMemory& memory);

  // kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<TrainingStep>> Make(const TrainerInputs& inputs,
                                                            RankMemory& memory,
                                                            MeteredGroups& groups,
                                                            GradientReduction& gradients,
                                                            ModelRunner& runner);

  // Before the first step: starts to read batches at the position.
  absl::Status Start();
  // Enqueues the next step. Its batches come from the loader, which may be waited for.
  absl::Status Enqueue();
  // Waits for the oldest step under way and reports it to the hooks. False: a rank has asked to
  // stop, and all ranks see it after the same step.
  absl::StatusOr<bool> Collect();
  // Steps that may be enqueued before the oldest one is collected; the same on every rank.
  int64_t steps_under_way() const { return static_cast<int64_t>(flights_.size()); }
  int64_t enqueued() const { return enqueued_; }
  // Later work on the computing stream sees updates of the offloaded state.
  void JoinOffload();

  // Of the steps that were collected.
  const TrainingPosition& position() const { return position_; }
  // Requires: nothing is under way.
  void SetPosition(const TrainingPosition& position);
  Optimizer& optimizer() { return *optimizer_; }

 private:
  // A step that is enqueued and not yet collected; a slot of a ring.
  struct Flight {
    kernels::StepOutcome* outcome = nullptr;  // pinned host memory, as are the next two
    float* stop = nullptr;
    float* residual_square = nullptr;
    double density = 1;
    std::unique_ptr<kernels::Event> done;
    // The end of the last backward and the end of the reductions, on the computing stream.
    std::unique_ptr<kernels::Event> reducing, reduced;
  };
  class Client;

  TrainingStep(const TrainerInputs& inputs, RankMemory& memory, MeteredGroups& groups,
               GradientReduction& gradients, ModelRunner& runner)
      : inputs_(inputs),
        memory_(memory),
        groups_(groups),
        gradients_(gradients),
        runner_(runner),
        flights_(StepsUnderWay(inputs.device.kind())) {}
  absl::Status Allocate();
  absl::Status RunMicroBatches(Flight& flight);
  // Enqueues what ranks exchange about the step, and the exchange.
  void ExchangeNumbers(Flight& flight);
  void Update();
  // The errors of a step that has run, or not.
  absl::Status CheckStreams() const;
  absl::Status CheckOutcome(const kernels::StepOutcome& outcome) const;
  StepReport MakeReport(const Flight& flight, const kernels::StepOutcome& outcome);

  const TrainerInputs& inputs_;
  RankMemory& memory_;
  MeteredGroups& groups_;
  GradientReduction& gradients_;
  ModelRunner& runner_;
  std::unique_ptr<kernels::Buffer> flight_memory_;
  std::vector<Flight> flights_;  // step s (from 1) is in slot (s - 1) % size
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<kernels::Replay> replay_;    // of updates; null where steps are not recorded
  std::unique_ptr<OptimizerOffload> offload_;  // null: all state is on the device
  std::unique_ptr<BatchLoader> loader_;
  TrainingPosition position_;
  int64_t enqueued_ = 0;             // >= position_.step
  kernels::Trace* trace_ = nullptr;  // of the step that is being enqueued
  std::chrono::steady_clock::time_point collected_at_;
  int64_t gradient_bytes_ = 0;  // sent up to the last step collected
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_TRAINING_STEP_H_
