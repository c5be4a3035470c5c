#include "coordinator/core/gang.h"

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

namespace muster::coordinator {
namespace {

// A job of 8 steps and the ranks of its newest attempt.
class Progress : public ::testing::Test {
 protected:
  Progress() { Start(1); }
  void Start(int ranks) {
    v1::AttemptRow attempt;
    for (int rank = 0; rank < ranks; ++rank) attempt.add_placements()->set_rank(rank);
    gang_ = Gang(attempt, now_);
  }
  static v1::RankProgress Report(int64_t step, int64_t first_point, int64_t last_point) {
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
  bool Take(const v1::RankProgress& report, int rank = 0) {
    return gang_.Take(rank, report, now_, {stored_, curve_, phase_, 8, 64}) ==
           Gang::Report::kChanged;
  }
  std::vector<int64_t> Steps() const {
    std::vector<int64_t> steps;
    for (const auto& [step, point] : curve_.points()) steps.push_back(step);
    return steps;
  }
  std::string Texts() const {
    std::string all = stored_.SerializeAsString();
    for (const auto& [step, point] : curve_.points()) all += point.SerializeAsString();
    return all;
  }

  const absl::Time now_ = absl::FromUnixSeconds(1000);
  Gang gang_;
  v1::ProgressRow stored_;
  LossCurve curve_;
  std::string phase_;
};

TEST_F(Progress, Curve_IsTheSameHoweverOftenRanksReport) {
  for (int64_t step = 1; step <= 8; ++step) Take(Report(step, 1, step));
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6, 7, 8}));
  const std::string often = Texts();
  Start(1);
  stored_.Clear();
  curve_ = LossCurve();
  Take(Report(3, 1, 3));
  Take(Report(8, 2, 8));
  EXPECT_EQ(Texts(), often);
}

TEST_F(Progress, EvaluationBeforeItsPoint_KeepsTheTrainingLossOfItsStep) {
  Take(Report(3, 1, 3));
  EXPECT_TRUE(AddEvaluation(4, 2.5, stored_, curve_));
  EXPECT_FALSE(AddEvaluation(4, 2.5, stored_, curve_));
  Take(Report(6, 1, 6));
  ASSERT_EQ(Steps(), (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));
  EXPECT_EQ(curve_.Find(4)->train_loss(), 2.5);
  EXPECT_EQ(curve_.Find(4)->validation_loss(), 2.5);
  EXPECT_EQ(stored_.validation_loss(), 2.5);
  EXPECT_TRUE(AddEvaluation(2, 9.0, stored_, curve_));
  EXPECT_EQ(stored_.validation_loss(), 2.5) << "it is older than the evaluation of step 4";
}

TEST_F(Progress, RestoredAttempt_DropsThePointsThatItTrainsAgain) {
  Take(Report(6, 1, 6));
  curve_.TakeChanged();
  Start(1);
  Take(Report(4, 4, 4));
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(curve_.TakeChanged(), (std::set<int64_t>{5, 6})) << "rows to remove";
  EXPECT_EQ(stored_.step(), 4);
}

// Such a rank reports the step of its checkpoint and has trained none itself.
TEST_F(Progress, RestoredRankWithoutALoss_AddsNoPointAndKeepsTheLastLoss) {
  Take(Report(6, 1, 6));
  const double loss = stored_.train_loss();
  v1::RankProgress restored;
  restored.set_step(4);
  restored.set_phase("restoring");
  Start(1);
  EXPECT_TRUE(Take(restored));
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(curve_.Find(4)->train_loss(), 2.5);
  EXPECT_EQ(stored_.train_loss(), loss);
  EXPECT_EQ(phase_, "restoring");
  EXPECT_FALSE(Take(restored));
}

TEST_F(Progress, RankThatIsFurthest_SpeaksForTheJobAndAnOlderReportForNobody) {
  Start(3);
  EXPECT_TRUE(Take(Report(2, 2, 2), 1));
  EXPECT_FALSE(Take(Report(1, 1, 0), 2)) << "it is behind";
  EXPECT_EQ(stored_.step(), 2);
  EXPECT_TRUE(Take(Report(3, 1, 0), 2));
  EXPECT_EQ(stored_.step(), 3);
  EXPECT_EQ(gang_.Take(2, Report(2, 1, 0), now_, {stored_, curve_, phase_, 8, 64}),
            Gang::Report::kOlder);
  EXPECT_EQ(stored_.step(), 3);
}

// Only rank 0 of the engine reports points; another one may be heard first.
TEST_F(Progress, RankWithoutPoints_AddsNone_ThoughItIsHeardFirst) {
  Start(2);
  EXPECT_TRUE(Take(Report(5, 1, 0), 1));
  EXPECT_TRUE(Steps().empty());
  v1::RankProgress points = Report(4, 1, 0);
  for (const int64_t at : {1, 3}) *points.add_losses() = Report(at, at, at).losses(0);
  Take(points);
  EXPECT_EQ(Steps(), (std::vector<int64_t>{1, 3}));
}

TEST_F(Progress, RanksThatAreGone_AreStoredAsRuns) {
  Start(6);
  for (const int rank : {0, 1, 2}) gang_.SetState(rank, v1::RANK_STATE_RELEASED);
  gang_.SetState(4, v1::RANK_STATE_EXITED);
  const std::vector<v1::RankRun> gone = gang_.Gone();
  ASSERT_EQ(gone.size(), 2u);
  EXPECT_EQ(gone[0].count(), 3);
  Start(6);
  for (const v1::RankRun& run : gone) gang_.RecoverGone(run);
  EXPECT_EQ(gang_.state(2), v1::RANK_STATE_RELEASED);
  EXPECT_EQ(gang_.state(3), v1::RANK_STATE_ASSIGNED);
  EXPECT_EQ(gang_.state(4), v1::RANK_STATE_EXITED);
  EXPECT_FALSE(gang_.AllAtLeast(v1::RANK_STATE_PREPARED));
}

}  // namespace
}  // namespace muster::coordinator
