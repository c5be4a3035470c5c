// The training loop of one rank.
#ifndef MUSTER_PARALLEL_TRAIN_TRAINER_H_
#define MUSTER_PARALLEL_TRAIN_TRAINER_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_system.h"
#include "base/ids.h"
#include "kernels/arena.h"
#include "kernels/device.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/comm/communicator.h"
#include "parallel/data/sampler.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/optim/optimizer.h"
#include "parallel/optim/schedule.h"
#include "parallel/train/batch_loader.h"

namespace muster::parallel {

struct TrainerOptions {
  int64_t steps = 0;
  int64_t global_batch = 0;  // samples per step; a multiple of micro_batch x ranks
  int64_t micro_batch = 0;
  uint64_t seed = 0;  // initial weights
  AdamWConfig optimizer;
  Schedule schedule;
  int64_t bucket_bytes = 4 << 20;
  bool overlap = true;             // reduce gradients while backward runs
  int64_t evaluate_every = 0;      // 0 = only after the last step
  int64_t evaluate_samples = 0;    // 0 = the whole validation set
  std::string checkpoint_root;     // empty = no checkpoints
  int64_t checkpoint_every = 0;    // > 0 with a root
  int checkpoint_keep = 2;         // committed ones
  bool checkpoint_on_stop = true;  // when asked to stop
  JobId job;                       // of the checkpoints' names
  Epoch epoch;
};

struct StepReport {
  int64_t step = 0;          // finished
  double loss = 0;           // nats per unmasked token, of the whole global batch
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  double seconds = 0;
  double exposed_communication_seconds = 0;  // of `seconds`, waiting for collectives
  int64_t tokens = 0;                        // unmasked, all ranks
  int64_t consumed_samples = 0;              // so far
};

struct EvaluationReport {
  int64_t step = 0;
  double loss = 0;  // nats per unmasked token
  int64_t tokens = 0;
  double seconds = 0;
};

struct SavedCheckpoint {
  CheckpointId id;
  SaveResult result;
  int64_t consumed_samples = 0;
  double seconds = 0;
};

// What the trainer tells and asks its surroundings. Called on the trainer's thread, between
// collectives; must not block for long.
class TrainerHooks {
 public:
  virtual ~TrainerHooks() = default;
  // "restoring", "training", "evaluating", "saving", "finished".
  virtual void OnPhase(absl::string_view phase) {}
  virtual void OnStep(const StepReport& report) {}
  virtual void OnEvaluation(const EvaluationReport& report) {}
  // Every rank; the result is complete on rank 0, which asks for it to be committed.
  virtual void OnSaved(const SavedCheckpoint& saved) {}
  virtual void OnDamaged(const CheckpointId& id, const absl::Status& why) {}  // rank 0
  virtual void OnRemoved(const CheckpointId& id) {}                           // rank 0
  // Training goes on: an old checkpoint could not be removed.
  virtual void OnWarning(const absl::Status& status) {}
  // Newest step of this attempt whose checkpoint counts; older ones may be pruned. Rank 0.
  virtual int64_t CommittedStep() { return 0; }
  // True on any rank ends all of them after the step that is under way.
  virtual bool StopRequested() { return false; }
};

// A committed checkpoint of an earlier attempt.
struct RestoreCandidate {
  CheckpointId id;
  std::string directory;
  std::string manifest_checksum;  // may be empty
};

// Owns parameters, optimizer state, workspace and loader of one data-parallel rank, and drives the
// steps. Single-threaded, apart from the communication stream and the loader's thread.
//
// A step: for every micro-batch forward and backward (gradients are reduced under the last
// backward), then one small all-reduce of (loss and token count of every micro-batch of the global
// batch, stop vote), then norm, clip, AdamW. Losses are exchanged one by one and summed in the same
// order everywhere, so all ranks report the same bits, for every number of ranks.
//
// Two runs with the same options, seed and number of ranks give the same losses bit for bit; with
// power-of-two micro-batches per rank also with other numbers of ranks (see GradientReducer).
//
// Every status that it returns is marked with a FailureDomain.
class Trainer {
 public:
  enum class Outcome { kFinished, kStopped };

  // Plans and allocates all memory. The model, device, communicator, samplers, file system and
  // hooks must outlive it; `validation` may be null. kMemory: kResourceExhausted with the sizes.
  // kConfiguration: batch sizes that do not divide.
  static absl::StatusOr<std::unique_ptr<Trainer>> Make(const TrainerOptions& options,
                                                       const Model& model, kernels::Device& device,
                                                       Communicator& communicator,
                                                       const Sampler& training,
                                                       const Sampler* validation, FileSystem& files,
                                                       TrainerHooks& hooks);
  ~Trainer();

  // Restores the first candidate that is sound, newest first; ranks agree on it. Rank 0 reads and
  // checks every byte; each rank verifies what it loads. Damaged ones are reported and skipped;
  // without any, training starts from the beginning. kStorage or kCommunication.
  absl::Status Restore(const std::vector<RestoreCandidate>& candidates);

  // Trains until the last step or a stop. Saves every checkpoint_every steps and after the last.
  absl::StatusOr<Outcome> Run();

  // Removes checkpoints that `keep` no longer covers, as far as newer ones are committed. Run()
  // does so at step boundaries; the caller once more after the last commit. Rank 0; others: no-op.
  void Prune();

  int64_t step() const { return step_; }
  int64_t consumed_samples() const { return consumed_samples_; }
  // Memory of the workspace by category, and of parameters, optimizer state and gradients.
  const kernels::Arena& arena() const { return arena_; }
  int64_t state_bytes() const { return FlatBuffers::Bytes(layout_, flat_->gradient_levels()); }

 private:
  Trainer(const TrainerOptions& options, const Model& model, kernels::Device& device,
          Communicator& communicator, const Sampler& training, const Sampler* validation,
          FileSystem& files, TrainerHooks& hooks);

  absl::Status Allocate();
  absl::Status Load(CheckpointReader& reader);
  // kMin over ranks of `ok`: true when it holds everywhere.
  absl::StatusOr<bool> Agree(bool ok);

  absl::StatusOr<bool> Step();  // false: a rank has asked to stop
  absl::Status RunMicroBatches(double* exposed_seconds);
  // All-reduces step_values_ and brings it to host_values_.
  absl::Status ExchangeStepValues();
  absl::Status Evaluate();
  absl::StatusOr<double> EvaluationLoss(int64_t samples, int64_t* tokens);
  absl::Status Save();
  absl::Status CopyToDevice(const MicroBatch& batch);
  int64_t micro_batches() const;         // per rank and step
  int64_t global_micro_batches() const;  // per step

  const TrainerOptions options_;
  const Model& model_;
  kernels::Device& device_;
  Communicator& communicator_;
  const Sampler& training_;
  const Sampler* const validation_;
  FileSystem& files_;
  TrainerHooks& hooks_;
  FlatLayout layout_;

  // In order of construction: streams end before the memory they use.
  kernels::Arena arena_;
  std::unique_ptr<FlatBuffers> flat_;
  std::unique_ptr<kernels::Buffer> values_, host_values_;
  std::unique_ptr<kernels::Event> values_ready_, values_reduced_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<kernels::Stream> compute_, communication_;
  std::unique_ptr<GradientReducer> reducer_;
  Workspace workspace_;
  std::unique_ptr<BatchLoader> loader_;

  int64_t step_ = 0;
  int64_t consumed_samples_ = 0;
  int64_t evaluated_step_ = -1;
  int64_t saved_step_ = -1;
  int64_t pruned_at_ = 0;                  // CommittedStep() when last pruned
  std::vector<CheckpointId> checkpoints_;  // committed earlier or saved by this attempt, by step
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_TRAINER_H_
