#include "coordinator/core/progress.h"

#include <gtest/gtest.h>

#include <vector>

namespace muster::coordinator {
namespace {

v1::Job JobOf(int64_t steps) {
  v1::Job job;
  job.set_steps(steps);
  return job;
}

v1::RankProgress Report(int64_t step, int64_t first_point, int64_t last_point) {
  v1::RankProgress progress;
  progress.set_step(step);
  progress.set_train_loss(10.0 / static_cast<double>(step));
  for (int64_t at = first_point; at <= last_point; ++at) {
    v1::LossPoint* point = progress.add_losses();
    point->set_step(at);
    point->set_train_loss(10.0 / static_cast<double>(at));
  }
  return progress;
}

std::vector<int64_t> StepsOf(const v1::Job& job) {
  std::vector<int64_t> steps;
  for (const v1::LossPoint& point : job.losses()) steps.push_back(point.step());
  return steps;
}

TEST(Progress, Curve_IsTheSameHoweverOftenRanksReport) {
  v1::Job often = JobOf(8), seldom = JobOf(8);
  for (int64_t step = 1; step <= 8; ++step) FoldProgress({Report(step, 1, step)}, often);
  FoldProgress({Report(3, 1, 3)}, seldom);
  FoldProgress({Report(8, 2, 8)}, seldom);
  EXPECT_EQ(StepsOf(often), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(often.SerializeAsString(), seldom.SerializeAsString());
}

TEST(Progress, EvaluationBeforeItsPoint_KeepsTheTrainingLossOfItsStep) {
  v1::Job job = JobOf(8);
  FoldProgress({Report(3, 1, 3)}, job);
  AddEvaluation(4, 2.5, job);
  FoldProgress({Report(6, 1, 6)}, job);
  ASSERT_EQ(StepsOf(job), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(job.losses(3).train_loss(), 2.5);
  EXPECT_EQ(job.losses(3).validation_loss(), 2.5);
  EXPECT_EQ(job.validation_loss(), 2.5);
}

TEST(Progress, RestoredAttempt_DropsThePointsThatItTrainsAgain) {
  v1::Job job = JobOf(8);
  FoldProgress({Report(6, 1, 6)}, job);
  FoldProgress({Report(4, 4, 4)}, job);
  EXPECT_EQ(StepsOf(job), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(job.step(), 4);
}

// Such a rank reports the step of its checkpoint and has trained none itself.
TEST(Progress, RestoredRankWithoutALoss_AddsNoPointAndKeepsTheLastLoss) {
  v1::Job job = JobOf(8);
  FoldProgress({Report(6, 1, 6)}, job);
  const double loss = job.train_loss();
  v1::RankProgress restored;
  restored.set_step(4);
  restored.set_phase("restoring");
  EXPECT_TRUE(FoldProgress({restored}, job));
  EXPECT_EQ(StepsOf(job), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(job.losses(3).train_loss(), 2.5);
  EXPECT_EQ(job.train_loss(), loss);
  EXPECT_EQ(job.phase(), "restoring");
  EXPECT_FALSE(FoldProgress({restored}, job));
}

}  // namespace
}  // namespace muster::coordinator
