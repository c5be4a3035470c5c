// One attempt from its launch to its end: what ends it, what that counts, what follows.
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "coordinator/core/causes.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(CoreTest, Launch_PreparesEveryRankBeforeAnyStarts) {
  Hello();
  Submit();
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_PREPARED);
  EXPECT_EQ(LastDesired()->attempts(0).ranks_size(), 2);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_RUNNING);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING);
}

// Two workers that lose each other once do not count as a failure; twice in a row they do.
TEST_F(CoreTest, NetworkFailureBetweenTheSameWorkers_CountsFromTheSecondInARow) {
  v1::Job job = Train();
  for (int i = 0; i < 3; ++i) {
    v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_NETWORK}});
    observed.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_peer(1);
    Observe(std::move(observed));
    Observe(Ranks(job, v1::RANK_STATE_RELEASED));
    ASSERT_EQ(Job().causes_size(), i + 1);
    const v1::AttemptEnd end = Job().causes(i);
    EXPECT_EQ(end.cause(), v1::CAUSE_NETWORK);
    EXPECT_EQ(end.rank(), 0);
    ASSERT_EQ(end.between_size(), 1) << "both ranks are on one worker";
    EXPECT_EQ(end.between(0), "w");
    EXPECT_THAT(end.message(), HasSubstr("between w (host"));
    EXPECT_EQ(end.counted(), i > 0) << i;
    if (i == 2) break;
    Wait(absl::Seconds(2));
    job = Job();
    Observe(Ranks(job, v1::RANK_STATE_PREPARED));
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Job().message(), HasSubstr("failed 2 time(s)"));
}

TEST_F(CoreTest, PreflightThatFails_EndsWithLaunchAndNamesTheWorkers) {
  Hello();
  Submit();
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  v1::Observed observed = Ranks(Job(), v1::RANK_STATE_RUNNING, {{1, v1::CAUSE_LAUNCH}});
  observed.mutable_attempts(0)->mutable_ranks(1)->mutable_exit()->set_peer(0);
  Observe(std::move(observed));
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_LAUNCH);
  EXPECT_EQ(Job().causes(0).between_size(), 1);
  EXPECT_FALSE(Job().causes(0).counted());
}

// A rank's report is not trusted: the peer may be a number that the job does not have.
TEST_F(CoreTest, ExitThatNamesAPeerOutsideTheJob_NamesNoWorkers) {
  const v1::Job job = Train();
  v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_NETWORK}});
  observed.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_peer(1000);
  Observe(std::move(observed));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).between_size(), 0);
}

TEST_F(CoreTest, NetworkFailureOfAWorkerThatIsThenLost_EndsWithWorkerLost) {
  const v1::Job job = Train();
  v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_NETWORK}});
  observed.mutable_attempts(0)->mutable_ranks(0)->mutable_exit()->set_peer(1);
  Observe(std::move(observed));
  Wait(config_.lost_after);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_WORKER_LOST);
  EXPECT_EQ(Job().causes(0).between_size(), 0);
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("before: between w"));
}

TEST_F(CoreTest, AllRanksCompleted_SucceedsOnceReleaseIsProven) {
  const v1::Job job = Train();
  const std::map<int, v1::Cause> done = {{0, v1::CAUSE_COMPLETED}, {1, v1::CAUSE_COMPLETED}};
  Observe(Ranks(job, v1::RANK_STATE_EXITED, done));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(core_->ListWorkers()[0].slots_free(), 0);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED, done));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(core_->ListWorkers()[0].slots_free(), 2);
}

TEST_F(CoreTest, CommunicationErrorThenCrashWithinTheGrace_EndsWithTheCrash) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMMUNICATION}}));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  now_ += absl::Milliseconds(500);
  Observe(
      Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMMUNICATION}, {1, v1::CAUSE_CRASH}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_CRASH);
  EXPECT_EQ(Job().causes(0).rank(), 1);
  EXPECT_TRUE(Job().causes(0).counted());
}

TEST_F(CoreTest, OutOfMemory_IsRetriedOnlyAfterTrainingBegan) {
  EXPECT_EQ(BudgetOf(v1::CAUSE_OUT_OF_MEMORY, /*trained=*/false), Budget::kNotRetried);
  EXPECT_EQ(BudgetOf(v1::CAUSE_OUT_OF_MEMORY, /*trained=*/true), Budget::kCounted);
}

TEST_F(CoreTest, CommunicationErrorAlone_EndsTheAttemptAfterTheGrace) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_COMMUNICATION}}));
  Wait(absl::Seconds(1));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
}

TEST_F(CoreTest, CrashAfterACommit_IsNotCountedAndRestartsFromTheCommit) {
  const v1::Job job = Train();
  EXPECT_EQ(Commit(job, 10), 0);
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().failures(), 0);
  // No rank has reported a step, but the commit proves that the attempt came that far.
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).step(), 10);
  Wait(absl::Seconds(1));
  EXPECT_EQ(Job().epoch(), 2u);
  ASSERT_TRUE(LastDesired().has_value());
  ASSERT_EQ(LastDesired()->attempts(0).ranks(0).restore_size(), 1);
  EXPECT_EQ(LastDesired()->attempts(0).ranks(0).restore(0).step(), 10);
}

TEST_F(CoreTest, Commit_OfAnEndedEpoch_IsRefusedUnlessItIsARepeat) {
  const v1::Job job = Train();
  EXPECT_EQ(Commit(job, 10), 0);
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Commit(job, 10), 0);
  EXPECT_EQ(Commit(job, 20), static_cast<int>(absl::StatusCode::kAborted));
  EXPECT_EQ(Job().last_committed_step(), 10);
}

TEST_F(CoreTest, BudgetUsedUp_FailsTheJobWithTheNumbers) {
  v1::Job job = Train();
  for (int i = 0; i < 2; ++i) {
    Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
    Observe(Ranks(job, v1::RANK_STATE_RELEASED));
    if (i == 1) break;
    Wait(absl::Seconds(1));
    job = Job();
    Observe(Ranks(job, v1::RANK_STATE_PREPARED));
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Job().message(), HasSubstr("restart.max_failures is 1"));
}

TEST_F(CoreTest, DataError_IsNotRetried) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_DATA}}));
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
}

TEST_F(CoreTest, Cancel_WhileTraining_WaitsForTheProofOfRelease) {
  const v1::Job job = Train();
  Handle(CancelEvent{CallId(3), "job"});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STOPPING);
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_STOPPED);
  revision_ = LastDesired()->revision();
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
  Handle(CancelEvent{CallId(4), "job"});
  EXPECT_OK(Actions<ReplyAction>()[0].status);
}

TEST_F(CoreTest, CoordinatorRestart_WorkersReturn_NothingIsRestarted) {
  const v1::Job job = Train();
  Restart();
  Wait(absl::Seconds(5));
  Hello(1, Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Job().epoch(), 1u);
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_RUNNING);
}

TEST_F(CoreTest, LostWorker_ReturnsWithStaleRanks_GetsNothingUntilTheyAreGone) {
  const v1::Job job = Train();
  Wait(config_.unreachable_after);
  EXPECT_EQ(core_->ListWorkers()[0].state(), v1::WORKER_STATE_UNREACHABLE);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  Wait(config_.lost_after);
  EXPECT_EQ(core_->ListWorkers()[0].state(), v1::WORKER_STATE_LOST);
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_WORKER_LOST);
  EXPECT_FALSE(Job().causes(0).counted());
  Wait(absl::Seconds(1));
  Hello(1, Ranks(job, v1::RANK_STATE_TRAINING));
  EXPECT_EQ(Job().epoch(), 1u);
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts_size(), 0);
  Observe({});
  EXPECT_EQ(Job().epoch(), 2u);
}

TEST_F(CoreTest, NoProgress_EndsTheAttemptAsAHang) {
  const v1::Job job = Train();
  for (absl::Duration t; t < config_.progress_timeout; t += absl::Seconds(2)) {
    now_ += absl::Seconds(2);
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
}

// A start may take any time while its phase changes. When it does not change for progress_timeout,
// the attempt ends and names the phase.
TEST_F(CoreTest, StartThatGetsStuck_EndsAsAHangInItsPhase) {
  Hello();
  Submit("r", 2);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  const v1::Job job = Job();
  const auto stay = [&](const char* phase, double share) {
    for (absl::Duration t; t < config_.progress_timeout * share; t += absl::Seconds(2)) {
      now_ += absl::Seconds(2);
      v1::Observed observed = Ranks(job, v1::RANK_STATE_RUNNING);
      for (v1::ObservedRank& rank : *observed.mutable_attempts(0)->mutable_ranks()) {
        rank.mutable_progress()->set_phase(phase);
      }
      Observe(std::move(observed));
    }
  };
  for (const char* phase : {"starting", "bootstrapping", "allocating"}) {
    stay(phase, 0.9);
    EXPECT_EQ(Job().state(), v1::JOB_STATE_STARTING) << phase;
    EXPECT_EQ(Job().phase(), phase);
  }
  stay("allocating", 0.2);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("training had not begun"));
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("(allocating)"));
}

}  // namespace
}  // namespace muster::coordinator
