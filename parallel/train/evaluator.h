// The loss on the validation set.
#ifndef MUSTER_PARALLEL_TRAIN_EVALUATOR_H_
#define MUSTER_PARALLEL_TRAIN_EVALUATOR_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "parallel/train/inputs.h"
#include "parallel/train/model_runner.h"
#include "parallel/train/rank_memory.h"

namespace muster::parallel {

// Runs forward passes over the validation samples, data-parallel ranks taking turns by
// micro-batch. Losses are exchanged one by one and summed in the same order everywhere, so every
// rank and every layout gets the same bits. Single-threaded; the arguments must outlive it.
class Evaluator {
 public:
  Evaluator(const TrainerInputs& inputs, RankMemory& memory, ModelRunner& runner)
      : inputs_(inputs), memory_(memory), runner_(runner) {}

  // Evaluates the model after `step` and tells the hooks. A collective; nothing must be under way
  // on the computing stream that changes weights. Does nothing without a validation set, and when
  // it has evaluated this step before. Marked with a FailureDomain.
  absl::Status Evaluate(int64_t step);

 private:
  class Client;
  absl::StatusOr<double> Loss(int64_t samples, int64_t* tokens);
  // Runs micro-batch `slot` of `slots`, which has up to micro_batch samples; none: an empty one.
  absl::Status RunBatch(const std::vector<int64_t>& samples, int64_t slot, int64_t slots);

  const TrainerInputs& inputs_;
  RankMemory& memory_;
  ModelRunner& runner_;
  int64_t evaluated_step_ = -1;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_EVALUATOR_H_
