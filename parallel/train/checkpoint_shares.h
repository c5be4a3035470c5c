// Which rank saves, verifies and removes what of a job's checkpoints.
#ifndef MUSTER_PARALLEL_TRAIN_CHECKPOINT_SHARES_H_
#define MUSTER_PARALLEL_TRAIN_CHECKPOINT_SHARES_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/model/parameters.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/train/inputs.h"
#include "parallel/train/rank_memory.h"

namespace muster::parallel {

// Ranks that hold the same weights divide each bucket among them. With one directory for all ranks,
// those are the ranks of a replicate group; where hosts have directories of their own
// (checkpoint.storage: local), the ranks of one directory, so that every host saves all that its
// ranks need. Immutable; `inputs` must outlive it.
class CheckpointShares {
 public:
  // A collective where there are several directories. kFailedPrecondition
  // (FailureDomain::kConfiguration) when a tensor group has ranks of two directories.
  static absl::StatusOr<CheckpointShares> Make(const TrainerInputs& inputs, RankMemory& memory);

  bool several_directories() const { return several_directories_; }
  // The first rank of a directory removes old checkpoints there.
  bool leads_directory() const;
  // The slice of this rank's part of a bucket that it saves.
  FlatRange Saved(const FlatLayout& layout, int bucket) const;
  // Whether this rank saves the parameter: one rank of every directory does.
  bool Saves(const Parameter& parameter) const;
  // What this rank verifies of a checkpoint in its directory.
  VerifyShare verify_share() const { return verify_share_; }

 private:
  explicit CheckpointShares(const TrainerInputs& inputs) : inputs_(&inputs) {}
  absl::Status DivideByDirectory(RankMemory& memory);

  const TrainerInputs* inputs_;
  // This rank among those of its directory that hold the same.
  int64_t saver_ = 0, savers_ = 1;
  bool several_directories_ = false;
  // No rank of this directory owns the first stage's copy of a tied table, so that the last stage's
  // copy is saved.
  bool saves_duplicates_ = false;
  VerifyShare verify_share_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_CHECKPOINT_SHARES_H_
