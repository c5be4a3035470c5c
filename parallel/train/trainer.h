// The training loop of one rank.
#ifndef MUSTER_PARALLEL_TRAIN_TRAINER_H_
#define MUSTER_PARALLEL_TRAIN_TRAINER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/train/checkpoint_shares.h"
#include "parallel/train/control_channel.h"
#include "parallel/train/evaluator.h"
#include "parallel/train/gradient_reduction.h"
#include "parallel/train/hooks.h"
#include "parallel/train/inputs.h"
#include "parallel/train/metered_groups.h"
#include "parallel/train/model_runner.h"
#include "parallel/train/options.h"
#include "parallel/train/rank_memory.h"
#include "parallel/train/state_restorer.h"
#include "parallel/train/state_saver.h"
#include "parallel/train/training_step.h"

namespace muster::parallel {

// Composes memory, step, evaluator and the reading and writing of checkpoints, and decides what
// comes when. Single-threaded, apart from the communication streams and the loader's thread.
//
// Two runs with the same options, seed and layout give the same losses bit for bit; with
// power-of-two degrees and micro-batches also other data-parallel layouts (see GradientReducer).
//
// Calls of Make, Restore, Initialize and Run are collectives: every rank makes the same ones in
// this order. Every status is marked with a FailureDomain.
class Trainer {
 public:
  enum class Outcome { kFinished, kStopped };

  // Plans and allocates all memory; weights get no values yet. The model, device, groups, samplers,
  // file system and hooks must outlive it; `validation` may be null. kMemory: kResourceExhausted
  // with the sizes. kConfiguration: options that do not fit (TrainerInputs::Check).
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const TrainerOptions& options,
                                                       const Model& model, kernels::Device& device,
                                                       MeshGroups& groups, const Sampler& training,
                                                       const Sampler* validation, FileSystem& files,
                                                       TrainerHooks& hooks);
  ~Trainer();

  // Restores the newest candidate that is sound on all ranks (state_restorer.h); they come newest
  // first. Without any, training starts from the beginning. kStorage, kData or kCommunication.
  absl::Status Restore(const std::vector<RestoreCandidate>& candidates);

  // Begins with the weights of `read` instead of those of the seed; every rank reads what it holds.
  // Before the first step. When a rank cannot, all fail: kStorage.
  absl::Status Initialize(WeightReader read);

  // Trains until the last step or a stop, from weights of the seed unless Restore or Initialize has
  // given others. Saves every checkpoint_every steps and after the last.
  absl::StatusOr<Outcome> Run();

  // Removes old checkpoints as far as newer ones are committed (StateSaver::Prune). Run() does so
  // at step boundaries; the caller once more after the last commit. Not a collective.
  void Prune() { saver_->Prune(); }
  // Whether this is the first rank of a directory of checkpoints: it removes old ones.
  bool LeadsDirectory() const { return shares_->leads_directory(); }

  int64_t step() const { return steps_->position().step; }
  int64_t consumed_samples() const { return steps_->position().consumed_samples; }
  // The workspace, with its bytes by category.
  const kernels::Arena& arena() const { return memory_->arena(); }
  int64_t state_bytes() const { return memory_->state_bytes(); }
  int64_t host_state_bytes() const { return memory_->host_state_bytes(); }
  // What this trainer was planned to take (memory.h).
  MemoryUse PredictedMemory() const { return memory_->Predicted(); }
  // That this rank has sent among those that share its key/value heads.
  int64_t key_bytes_sent() const { return gradients_->key_bytes_sent(); }

 private:
  Trainer(const TrainerOptions& options, const Model& model, kernels::Device& device,
          MeshGroups& groups, const Sampler& training, const Sampler* validation, FileSystem& files,
          TrainerHooks& hooks);
  absl::Status Allocate();
  // Draws the weights from the seed, unless there are others.
  absl::Status EnsureWeights();
  // Enqueues steps up to the next one behind which the host has something to do. False: a rank has
  // asked to stop.
  absl::StatusOr<bool> RunToBoundary();
  bool Verifies(int64_t step) const;
  bool Evaluates(int64_t step) const;
  bool Saves(int64_t step) const;

  const TrainerOptions options_;
  const TrainerInputs inputs_;
  // In order of construction; each uses those above it.
  std::unique_ptr<RankMemory> memory_;
  std::unique_ptr<MeteredGroups> groups_;
  std::unique_ptr<GradientReduction> gradients_;
  std::unique_ptr<ModelRunner> runner_;
  std::unique_ptr<TrainingStep> steps_;
  std::unique_ptr<Evaluator> evaluator_;
  std::unique_ptr<ControlChannel> channel_;
  std::optional<CheckpointShares> shares_;
  std::unique_ptr<StateSaver> saver_;
  std::unique_ptr<StateRestorer> restorer_;
  bool has_weights_ = false;
  bool ended_well_ = false;  // Run() has come to its end, so it has on all ranks
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_TRAINER_H_
