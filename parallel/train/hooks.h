// What a Trainer reports to the process around it, and what it asks.
#ifndef MUSTER_PARALLEL_TRAIN_HOOKS_H_
#define MUSTER_PARALLEL_TRAIN_HOOKS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/device/trace.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/comm/exposure.h"

namespace muster::parallel {

struct StepReport {
  int64_t step = 0;          // that has finished; the first is 1
  double loss = 0;           // nats per unmasked token, of the whole global batch
  double gradient_norm = 0;  // before clipping
  double learning_rate = 0;
  double seconds = 0;
  double exposed_communication_seconds = 0;  // of `seconds`, waiting for other ranks
  ExposedSeconds exposed;                    // the same, by what was waited for and in what
  int64_t tokens = 0;                        // unmasked, of all ranks
  int64_t consumed_samples = 0;              // since the beginning of the run
  bool skipped = false;                      // fp16: an overflow, so there was no update
  double loss_scale = 1;
  int64_t gradient_bytes = 0;   // that this rank has sent to reduce gradients
  double gradient_density = 1;  // of compressed gradients: share of the elements that was sent
  double residual_norm = 0;     // of what gradient compression has held back on this rank
};

struct EvaluationReport {
  int64_t step = 0;
  double loss = 0;     // nats per unmasked token
  int64_t tokens = 0;  // unmasked
  double seconds = 0;
};

struct SavedCheckpoint {
  CheckpointId id;
  SaveResult result;
  int64_t consumed_samples = 0;
  double seconds = 0;
};

// All calls come on the trainer's thread, between collectives, and must return soon.
class TrainerHooks {
 public:
  virtual ~TrainerHooks() = default;
  // "verifying" and "restoring" a checkpoint, "loading" the weights of Trainer::Initialize,
  // "initializing" (weights are drawn from the seed), "training", "evaluating", "saving",
  // "finished".
  virtual void OnPhase(absl::string_view phase) {}
  // The phase goes on and is this far, 0 to 1 over all ranks. Phases that read or write
  // files report this about once a second, however long that takes. The coordinator
  // takes a phase whose `fraction` grows for alive.
  virtual void OnProgress(absl::string_view phase, double fraction) {}
  // The step is enqueued next. Returns where its spans are recorded, or null for nowhere. What is
  // returned must live until OnStep of that step has run, or until the trainer is destroyed.
  virtual kernels::Trace* BeginStep(int64_t step) { return nullptr; }
  // In order, without a gap. On CUDA the host learns of a step when it has enqueued later ones.
  virtual void OnStep(const StepReport& report) {}
  virtual void OnEvaluation(const EvaluationReport& report) {}
  // On every rank. The result is complete on rank 0, which asks for it to be committed.
  virtual void OnSaved(const SavedCheckpoint& saved) {}
  virtual void OnDamaged(const CheckpointId& id, const absl::Status& why) {}  // rank 0
  virtual void OnRemoved(const CheckpointId& id) {}                           // rank 0
  // Training goes on without what the status says.
  virtual void OnWarning(const absl::Status& status) {}
  // Newest step of this attempt whose checkpoint the coordinator has committed; older checkpoints
  // may be removed.
  virtual int64_t CommittedStep() { return 0; }
  // True on any rank ends all ranks after the step that is under way.
  virtual bool StopRequested() { return false; }
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_HOOKS_H_
