#include "tests/parity/recorder.h"

#include <gtest/gtest.h>

namespace muster::parallel::parity {

void Recorder::OnPhase(absl::string_view phase) { recorded_.phases.emplace_back(phase); }

void Recorder::OnProgress(absl::string_view phase, double fraction) {
  EXPECT_GE(fraction, 0);
  EXPECT_LE(fraction, 1);
  recorded_.progress.emplace_back(phase);
  if (on_progress) on_progress(phase);
}

void Recorder::OnStep(const StepReport& report) {
  recorded_.losses.push_back(report.loss);
  recorded_.norms.push_back(report.gradient_norm);
  recorded_.reports.push_back(report);
  step_ = report.step;
  if (on_step) on_step(step_);
}

void Recorder::OnEvaluation(const EvaluationReport& report) {
  recorded_.validation[report.step] = report.loss;
}

void Recorder::OnSaved(const SavedCheckpoint& saved) {
  recorded_.saved.insert(recorded_.saved.begin(),
                         {saved.id, saved.result.directory, saved.result.manifest_checksum});
  if (commit) committed_ = saved.id.step;
}

void Recorder::OnDamaged(const CheckpointId& id, const absl::Status& why) {
  recorded_.damaged.push_back(id.step);
  recorded_.damage.push_back(why);
}

void Recorder::OnRemoved(const CheckpointId& id) { recorded_.removed.push_back(id.step); }

void Recorder::OnWarning(const absl::Status& status) { recorded_.warnings.push_back(status); }

void ExpectSameBits(const Recorded& expected, const Recorded& actual) {
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  ASSERT_TRUE(actual.status.ok()) << actual.status;
  EXPECT_FALSE(expected.losses.empty());
  EXPECT_EQ(actual.losses, expected.losses);
  EXPECT_EQ(actual.norms, expected.norms);
  EXPECT_EQ(actual.validation, expected.validation);
}

void ExpectClose(const Recorded& expected, const Recorded& actual, double tolerance) {
  ASSERT_TRUE(expected.status.ok()) << expected.status;
  ASSERT_TRUE(actual.status.ok()) << actual.status;
  ASSERT_FALSE(actual.losses.empty());
  ASSERT_LE(actual.losses.size(), expected.losses.size());
  const size_t skipped = expected.losses.size() - actual.losses.size();
  for (size_t i = 0; i < actual.losses.size(); ++i) {
    const size_t step = i + skipped;
    EXPECT_NEAR(actual.losses[i] / expected.losses[step], 1, tolerance) << "step " << step + 1;
    EXPECT_NEAR(actual.norms[i] / expected.norms[step], 1, tolerance) << "step " << step + 1;
  }
  for (const auto& [step, loss] : actual.validation) {
    ASSERT_EQ(expected.validation.count(step), 1u);
    EXPECT_NEAR(loss / expected.validation.at(step), 1, tolerance) << "validation at " << step;
  }
}

}  // namespace muster::parallel::parity
