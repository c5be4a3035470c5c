#include "parallel/train/trainer.h"

#include <utility>

#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/train/failure.h"
#include "parallel/train/replica_check.h"

namespace muster::parallel {

Trainer::Trainer(const TrainerOptions& options, const Model& model, kernels::Device& device,
                 MeshGroups& groups, const Sampler& training, const Sampler* validation,
                 FileSystem& files, TrainerHooks& hooks)
    : options_(options), inputs_{options_, model,      device, groups,
                                 training, validation, files,  hooks} {}

Trainer::~Trainer() {
  if (memory_ == nullptr) return;
  // Work under way still refers to what is destroyed next. Run() has returned its errors.
  std::vector<kernels::Stream*> streams = {&memory_->communication(), &memory_->gathering(),
                                           &memory_->compute()};
  if (runner_ != nullptr) streams = runner_->streams();
  for (kernels::Stream* stream : streams) stream->Synchronize().IgnoreError();
  memory_->StopSharing(/*all_ranks=*/ended_well_);
}

absl::StatusOr<std::unique_ptr<Trainer>> Trainer::Make(const TrainerOptions& options,
                                                       const Model& model, kernels::Device& device,
                                                       MeshGroups& groups, const Sampler& training,
                                                       const Sampler* validation, FileSystem& files,
                                                       TrainerHooks& hooks) {
  std::unique_ptr<Trainer> trainer(
      new Trainer(options, model, device, groups, training, validation, files, hooks));
  RETURN_IF_ERROR(Mark(trainer->inputs_.Check(), FailureDomain::kConfiguration));
  absl::Status status = trainer->Allocate();
  if (!status.ok()) {
    const bool memory = status.code() == absl::StatusCode::kResourceExhausted;
    return Mark(std::move(status), memory ? FailureDomain::kMemory : FailureDomain::kUnknown);
  }
  return trainer;
}

absl::Status Trainer::Allocate() {
  ASSIGN_OR_RETURN(memory_, RankMemory::Make(inputs_));
  groups_ = std::make_unique<MeteredGroups>(inputs_.device, memory_->compute(), inputs_.groups,
                                            static_cast<int>(StepsUnderWay(inputs_.device.kind())));
  ASSIGN_OR_RETURN(gradients_, GradientReduction::Make(inputs_, *memory_, *groups_));
  ASSIGN_OR_RETURN(runner_, ModelRunner::Make(inputs_, *memory_, *groups_, *gradients_,
                                              TrainingStep::Records(inputs_, *memory_)));
  ASSIGN_OR_RETURN(steps_, TrainingStep::Make(inputs_, *memory_, *groups_, *gradients_, *runner_));
  evaluator_ = std::make_unique<Evaluator>(inputs_, *memory_, *runner_);
  RETURN_IF_ERROR(gradients_->CompareWithDense());
  RETURN_IF_ERROR(memory_->ShareWithPeers());
  ASSIGN_OR_RETURN(channel_, ControlChannel::Make(inputs_.world(), options_.control_interval));
  ASSIGN_OR_RETURN(shares_, CheckpointShares::Make(inputs_, *memory_));
  saver_ = std::make_unique<StateSaver>(inputs_, *memory_, *gradients_, steps_->optimizer(),
                                        *shares_, *channel_);
  restorer_ = std::make_unique<StateRestorer>(inputs_, *memory_, *gradients_, steps_->optimizer(),
                                              *shares_, *channel_);
  return absl::OkStatus();
}

absl::Status Trainer::Restore(const std::vector<RestoreCandidate>& candidates) {
  if (candidates.empty()) return absl::OkStatus();
  ASSIGN_OR_RETURN(const std::optional<TrainingPosition> position, restorer_->Restore(candidates));
  if (!position.has_value()) return absl::OkStatus();
  std::vector<CheckpointId> committed;
  for (const RestoreCandidate& candidate : candidates) committed.push_back(candidate.id);
  saver_->Restored(position->step, committed);
  steps_->SetPosition(*position);
  runner_->PublishWeights();
  has_weights_ = true;
  return absl::OkStatus();
}

absl::Status Trainer::Initialize(WeightReader read) {
  CHECK_EQ(step(), 0);
  RETURN_IF_ERROR(restorer_->LoadWeights(read));
  runner_->PublishWeights();
  has_weights_ = true;
  return absl::OkStatus();
}

absl::Status Trainer::EnsureWeights() {
  if (has_weights_) return absl::OkStatus();
  inputs_.hooks.OnPhase("initializing");
  RETURN_IF_ERROR(memory_->flat().Initialize(memory_->compute(), options_.seed));
  runner_->PublishWeights();
  has_weights_ = true;
  return absl::OkStatus();
}

bool Trainer::Verifies(int64_t step) const {
  const int64_t every = options_.verify_every;
  return every > 0 && (step % every == 0 || step == options_.steps);
}

bool Trainer::Evaluates(int64_t step) const {
  const int64_t every = options_.evaluate_every;
  return step == options_.steps || (every > 0 && step % every == 0);
}

bool Trainer::Saves(int64_t step) const {
  return !options_.checkpoint_root.empty() &&
         (step == options_.steps || step % options_.checkpoint_every == 0);
}

absl::StatusOr<bool> Trainer::RunToBoundary() {
  // Every rank counts the same steps ahead, so all of them stop after the same one.
  const int64_t ahead = steps_->steps_under_way() - 1;
  bool stop = false;
  for (bool draining = false; !draining || step() < steps_->enqueued();) {
    if (!draining) {
      RETURN_IF_ERROR(steps_->Enqueue());
      const int64_t last = steps_->enqueued();
      draining = Verifies(last) || Evaluates(last) || Saves(last);
    }
    while (steps_->enqueued() - step() > (draining ? 0 : ahead)) {
      ASSIGN_OR_RETURN(const bool go_on, steps_->Collect());
      if (!go_on) stop = draining = true;
      Prune();
    }
  }
  return !stop;
}

absl::StatusOr<Trainer::Outcome> Trainer::Run() {
  RETURN_IF_ERROR(EnsureWeights());
  RETURN_IF_ERROR(steps_->Start());
  inputs_.hooks.OnPhase("training");
  while (step() < options_.steps) {
    ASSIGN_OR_RETURN(const bool go_on, RunToBoundary());
    const bool last = step() == options_.steps;
    const bool stop = !go_on && !last;
    const bool save =
        Saves(step()) || (stop && options_.checkpoint_on_stop && !options_.checkpoint_root.empty());
    steps_->JoinOffload();
    if (Verifies(step())) {
      RETURN_IF_ERROR(CheckReplicas(inputs_, *memory_, *runner_, step()));
    }
    // Saving first: an evaluation may be long, and the steps should count by then.
    if (save) RETURN_IF_ERROR(saver_->Save(steps_->position()));
    if (stop) {
      ended_well_ = true;
      return Outcome::kStopped;
    }
    const bool evaluate = Evaluates(step());
    if (evaluate) RETURN_IF_ERROR(evaluator_->Evaluate(step()));
    Prune();
    if ((save || evaluate) && !last) inputs_.hooks.OnPhase("training");
  }
  // A job that was restored at its last step still owes the evaluation.
  RETURN_IF_ERROR(evaluator_->Evaluate(step()));
  inputs_.hooks.OnPhase("finished");
  ended_well_ = true;
  return Outcome::kFinished;
}

}  // namespace muster::parallel
