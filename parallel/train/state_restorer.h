// Reads the state of training from checkpoints.
#ifndef MUSTER_PARALLEL_TRAIN_STATE_RESTORER_H_
#define MUSTER_PARALLEL_TRAIN_STATE_RESTORER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "parallel/checkpoint/box.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/optim/optimizer.h"
#include "parallel/train/checkpoint_shares.h"
#include "parallel/train/control_channel.h"
#include "parallel/train/gradient_reduction.h"
#include "parallel/train/inputs.h"
#include "parallel/train/rank_memory.h"
#include "parallel/train/training_step.h"

namespace muster::parallel {

// A committed checkpoint of an earlier attempt.
struct RestoreCandidate {
  CheckpointId id;
  std::string directory;
  std::string manifest_checksum;  // SaveResult's; may be empty
};

// Writes the elements `box` of a parameter to `out`: fp32, row-major, box.elements() of them.
using WeightReader =
    absl::FunctionRef<absl::Status(const std::string& name, const Box& box, float* out)>;

// All ranks agree on the newest checkpoint that is sound. First they verify it: each rank reads its
// share of the files (CheckpointShares::verify_share), so that every byte is checked once per
// directory. Then each rank loads what it holds, and verifies the chunks that it reads for that.
// When a rank finds damage, all go on with the checkpoint before. The ranks wait for each other
// through the control channel, as long as it takes.
//
// Writes master weights and moments of the flat buffers, the optimizer's scalars and what gradient
// compression holds back. Bringing the weights to where the model reads them is left to the caller.
// Single-threaded; the arguments must outlive it. Calls are collectives; statuses are marked with a
// FailureDomain.
class StateRestorer {
 public:
  StateRestorer(const TrainerInputs& inputs, RankMemory& memory, GradientReduction& gradients,
                Optimizer& optimizer, const CheckpointShares& shares, ControlChannel& channel)
      : inputs_(inputs),
        memory_(memory),
        gradients_(gradients),
        optimizer_(optimizer),
        shares_(shares),
        channel_(channel) {}

  // Restores the first sound candidate; they come newest first. Damaged ones are told to the hooks
  // of rank 0. nullopt when none is sound: then moments and scalars are as at the beginning of a
  // run, and the weights are undefined. kFailedPrecondition (FailureDomain::kData) when the
  // training data is not what the checkpoint was trained on.
  absl::StatusOr<std::optional<TrainingPosition>> Restore(
      const std::vector<RestoreCandidate>& candidates);

  // Fills the master weights from `read`, of which every rank reads what it holds. When one of them
  // cannot, all fail: kStorage.
  absl::Status LoadWeights(WeightReader read);

 private:
  // Opens the candidate's manifest and verifies this rank's share of its bytes.
  absl::Status Verify(const RestoreCandidate& candidate, ControlChannel::Work& work,
                      std::unique_ptr<CheckpointReader>& reader);
  absl::Status CheckData(const CheckpointReader& reader) const;
  absl::Status Load(CheckpointReader& reader, ControlChannel::Work& work);
  absl::Status LoadTensors(CheckpointReader& reader, ControlChannel::Work& work);
  // The own parts of parameters (0) or of one of their moments (1, 2).
  absl::Status LoadOwn(int state, WeightReader read, ControlChannel::Work& work);
  absl::Status LoadResiduals(CheckpointReader& reader);
  // Of parameters that are not compressed here, but were where the checkpoint was saved: the sum of
  // what the ranks had not sent is carried into the gradients of the next step.
  absl::Status LoadCarried(CheckpointReader& reader);
  absl::Status LoadScalars(const CheckpointState& state);
  // Tells the hooks why the candidate is not restored. `own`: why this rank cannot use it, or OK.
  absl::Status Reject(const RestoreCandidate& candidate, const absl::Status& own);
  absl::Status Reset();
  kernels::Tensor Moment(int state, int bucket);

  const TrainerInputs& inputs_;
  RankMemory& memory_;
  GradientReduction& gradients_;
  Optimizer& optimizer_;
  const CheckpointShares& shares_;
  ControlChannel& channel_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_STATE_RESTORER_H_
