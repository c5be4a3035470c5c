// Runs passes of this rank's part of the model over micro-batches.
#ifndef MUSTER_PARALLEL_TRAIN_MODEL_RUNNER_H_
#define MUSTER_PARALLEL_TRAIN_MODEL_RUNNER_H_

#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/device/trace.h"
#include "kernels/tensor.h"
#include "parallel/context/context_attention.h"
#include "parallel/model/model.h"
#include "parallel/model/tensor_stream.h"
#include "parallel/optim/parameter_gatherer.h"
#include "parallel/pipeline/executor.h"
#include "parallel/train/gradient_reduction.h"
#include "parallel/train/inputs.h"
#include "parallel/train/metered_groups.h"
#include "parallel/train/rank_memory.h"

namespace muster::parallel {

// Owns the executor, the gather of sharded parameters and the streams of tensor and context
// collectives. A training step and an evaluation use the same one, one after the other.
// Single-threaded; the arguments must outlive it.
class ModelRunner {
 public:
  // Takes the workspace of `memory`. `record`: see PipelineExecutor::Options::replay. A collective
  // like RankMemory::TakeWorkspace. kInvalidArgument when model and pipeline do not fit;
  // kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Make(const TrainerInputs& inputs,
                                                           RankMemory& memory,
                                                           MeteredGroups& groups,
                                                           GradientReduction& gradients,
                                                           bool record);

  PipelineExecutor& executor() { return *executor_; }
  ParameterGatherer& gatherer() { return *gatherer_; }
  // All streams of training, those of RankMemory too; the computing stream is the last.
  std::vector<kernels::Stream*> streams() const;

  // What the passes of a step and of an evaluation have in common. `trace` may be null.
  Pass MakePass(kernels::Trace* trace);
  // Enqueues a copy of this rank's tokens out of whole sequences: `whole` is i32 [micro_batch x
  // sequence_length] on the host, `local` the rank's chunks of them, on the device.
  void CopyTokens(const kernels::Tensor& whole, const kernels::Tensor& local);
  // After the own master weights were written: brings them to where the model reads them, on all
  // ranks. A collective where parameters are sharded.
  void PublishWeights();

 private:
  ModelRunner(const TrainerInputs& inputs, RankMemory& memory, MeteredGroups& groups)
      : inputs_(inputs), memory_(memory), groups_(groups) {}
  absl::Status Allocate(GradientReduction& gradients, bool record);
  absl::Status AllocatePositions();

  const TrainerInputs& inputs_;
  RankMemory& memory_;
  MeteredGroups& groups_;
  std::unique_ptr<kernels::Buffer> positions_;  // of the rank's tokens; null without context ranks
  std::unique_ptr<ContextOverlap> context_stream_;  // null: context exchanges run on `compute`
  std::unique_ptr<TensorStream> tensor_stream_;     // null: tensor collectives run on `compute`
  std::unique_ptr<ParameterGatherer> gatherer_;
  std::unique_ptr<PipelineExecutor> executor_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_MODEL_RUNNER_H_
