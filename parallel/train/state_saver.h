// Writes the state of training to checkpoints, and removes old ones.
#ifndef MUSTER_PARALLEL_TRAIN_STATE_SAVER_H_
#define MUSTER_PARALLEL_TRAIN_STATE_SAVER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/optimizer/optimizer.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/optim/optimizer.h"
#include "parallel/train/checkpoint_shares.h"
#include "parallel/train/control_channel.h"
#include "parallel/train/gradient_reduction.h"
#include "parallel/train/inputs.h"
#include "parallel/train/rank_memory.h"
#include "parallel/train/training_step.h"

namespace muster::parallel {

// Every rank saves its share of every bucket: parameters, both moments, and what gradient
// compression holds back. Ranks wait for the slowest writer through the control channel, as long as
// it takes. Single-threaded; the arguments must outlive it.
class StateSaver {
 public:
  StateSaver(const TrainerInputs& inputs, RankMemory& memory, GradientReduction& gradients,
             Optimizer& optimizer, const CheckpointShares& shares, ControlChannel& channel)
      : inputs_(inputs),
        memory_(memory),
        gradients_(gradients),
        optimizer_(optimizer),
        shares_(shares),
        channel_(channel) {}

  // Saves the state at `position` and tells the hooks; does nothing when that step is saved
  // already. A collective, between steps. Takes one chunk in host memory and one staging buffer in
  // pinned memory (SaveElementsOf). Statuses are marked: kStorage, kCommunication, kMemory.
  absl::Status Save(const TrainingPosition& position);
  // Training goes on from the checkpoint of `step`; `committed` are those of earlier attempts,
  // newest first.
  void Restored(int64_t step, const std::vector<CheckpointId>& committed);
  // Removes checkpoints beyond checkpoint_keep, as far as newer ones are committed. Does nothing on
  // ranks that do not lead a directory. A failure is a warning.
  void Prune();

 private:
  class ChunkReader;
  void AddState(ChunkReader& reader, std::vector<SaveChunk>& chunks);
  void AddResiduals(ChunkReader& reader, std::vector<SaveChunk>& chunks);
  CheckpointState Describe(const TrainingPosition& position,
                           const kernels::StepState& optimizer) const;
  // The texts of all ranks, once the slowest rank has made its own.
  absl::StatusOr<std::vector<std::string>> Gather(absl::FunctionRef<std::string()> text,
                                                  ChunkReader& reader);

  const TrainerInputs& inputs_;
  RankMemory& memory_;
  GradientReduction& gradients_;
  Optimizer& optimizer_;
  const CheckpointShares& shares_;
  ControlChannel& channel_;
  int64_t saved_step_ = -1;
  int64_t pruned_at_ = 0;                  // CommittedStep() when last pruned
  std::vector<CheckpointId> checkpoints_;  // committed earlier or saved by this attempt, by step
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_STATE_SAVER_H_
