// Records what the trainer of one rank reports, to compare runs.
#ifndef MUSTER_TESTS_PARITY_RECORDER_H_
#define MUSTER_TESTS_PARITY_RECORDER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "parallel/train/trainer.h"

namespace muster::parallel::parity {

struct Recorded {
  absl::Status status;
  std::vector<double> losses, norms;
  std::vector<StepReport> reports;
  std::map<int64_t, double> validation;   // loss by step
  std::vector<RestoreCandidate> saved;    // newest first
  std::vector<int64_t> damaged, removed;  // steps of checkpoints, in the order of the reports
  std::vector<absl::Status> damage;       // why, for each of `damaged`
  std::vector<absl::Status> warnings;
  std::vector<std::string> phases;
  std::vector<std::string> progress;  // the phase of each report of progress
};

// The trainer's hooks. `recorded` must outlive it.
class Recorder : public TrainerHooks {
 public:
  explicit Recorder(Recorded& recorded) : recorded_(recorded) {}

  int64_t stop_after = 0;  // > 0: asks to stop in this step
  bool commit = false;     // saved checkpoints are committed at once
  std::function<void(int64_t step)> on_step;
  std::function<void(absl::string_view phase)> on_progress;

  void OnPhase(absl::string_view phase) override;
  void OnProgress(absl::string_view phase, double fraction) override;
  void OnStep(const StepReport& report) override;
  void OnEvaluation(const EvaluationReport& report) override;
  void OnSaved(const SavedCheckpoint& saved) override;
  void OnDamaged(const CheckpointId& id, const absl::Status& why) override;
  void OnRemoved(const CheckpointId& id) override;
  void OnWarning(const absl::Status& status) override;
  int64_t CommittedStep() override { return committed_; }
  // The trainer asks while it enqueues the step behind the last one reported.
  bool StopRequested() override { return stop_after > 0 && step_ + 1 >= stop_after; }

 private:
  Recorded& recorded_;
  int64_t step_ = 0;
  int64_t committed_ = 0;
};

void ExpectSameBits(const Recorded& expected, const Recorded& actual);
// Compares losses and norms of every step by their relative difference. `actual` may have the last
// steps only.
void ExpectClose(const Recorded& expected, const Recorded& actual, double tolerance = 1e-5);

}  // namespace muster::parallel::parity

#endif  // MUSTER_TESTS_PARITY_RECORDER_H_
