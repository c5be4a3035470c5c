// What one rank's training tells, kept to be compared.
#ifndef MUSTER_TESTS_PARITY_RECORDER_H_
#define MUSTER_TESTS_PARITY_RECORDER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "parallel/train/trainer.h"

namespace muster::parallel::parity {

struct Recorded {
  absl::Status status;
  std::vector<double> losses, norms;
  std::vector<StepReport> reports;
  std::map<int64_t, double> validation;   // loss by step
  std::vector<RestoreCandidate> saved;    // newest first
  std::vector<int64_t> damaged, removed;  // steps of checkpoints, in the order they were told
  std::vector<absl::Status> warnings;
};

// The trainer's hooks. `recorded` must outlive it.
class Recorder : public TrainerHooks {
 public:
  explicit Recorder(Recorded& recorded) : recorded_(recorded) {}

  int64_t stop_after = 0;  // > 0: asks to stop in this step
  bool commit = false;     // what is saved counts at once
  std::function<void(int64_t step)> on_step;

  void OnStep(const StepReport& report) override;
  void OnEvaluation(const EvaluationReport& report) override;
  void OnSaved(const SavedCheckpoint& saved) override;
  void OnDamaged(const CheckpointId& id, const absl::Status& why) override;
  void OnRemoved(const CheckpointId& id) override;
  void OnWarning(const absl::Status& status) override;
  int64_t CommittedStep() override { return committed_; }
  // Asked during the step after the last one told.
  bool StopRequested() override { return stop_after > 0 && step_ + 1 >= stop_after; }

 private:
  Recorded& recorded_;
  int64_t step_ = 0;
  int64_t committed_ = 0;
};

void ExpectSameBits(const Recorded& expected, const Recorded& actual);
// Losses and norms of every step, relatively. `actual` may cover the last steps only.
void ExpectClose(const Recorded& expected, const Recorded& actual, double tolerance = 1e-5);

}  // namespace muster::parallel::parity

#endif  // MUSTER_TESTS_PARITY_RECORDER_H_
