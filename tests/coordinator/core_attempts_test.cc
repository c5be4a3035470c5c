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

// Workers "a", "b" and "c" with one slot each, and a job with a rank on each of them.
class ThreeWorkersTest : public CoreTest {
 protected:
  ThreeWorkersTest() {
    for (const char* worker : {"a", "b", "c"}) {
      const SessionOpened hello = HelloOf(worker, 1);
      sessions_[worker] = hello.session;
      Handle(hello);
    }
    Submit("r", 3);
    for (const v1::RankState state : {v1::RANK_STATE_PREPARED, v1::RANK_STATE_TRAINING}) {
      for (const char* worker : {"a", "b", "c"}) Report(worker, state);
    }
    EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  }

  int RankOn(const std::string& worker) const {
    const v1::Job job = Job();
    for (const v1::RankStatus& rank : job.ranks()) {
      if (rank.worker() == worker) return rank.rank();
    }
    ADD_FAILURE() << "no rank is on " << worker;
    return 0;
  }
  // The daemon of `worker` reports its rank in `state`.
  void Report(const std::string& worker, v1::RankState state,
              const std::optional<v1::RankExit>& exit = std::nullopt) {
    v1::FromWorker message;
    message.set_incarnation(1);
    v1::ObservedAttempt& attempt = *message.mutable_observed()->add_attempts();
    attempt.set_job_id(Job().id());
    attempt.set_epoch(Job().epoch());
    v1::ObservedRank& rank = *attempt.add_ranks();
    rank.set_rank(RankOn(worker));
    rank.set_state(state);
    if (exit.has_value()) *rank.mutable_exit() = *exit;
    Handle(SessionMessage{sessions_[worker], message});
  }
  // The event of this kind among the actions of the last Handle.
  v1::Event EventOf(v1::EventKind kind) const {
    for (const EventAppended& appended : Actions<EventAppended>()) {
      if (appended.event.kind() == kind) return appended.event;
    }
    ADD_FAILURE() << "no event " << v1::EventKind_Name(kind);
    return {};
  }

  std::map<std::string, SessionId> sessions_;
};

TEST_F(ThreeWorkersTest, AttemptThatEndsBetweenTwoWorkers_NamesThemInItsEvents) {
  v1::RankExit exit;
  exit.set_cause(v1::CAUSE_NETWORK);
  exit.set_peer(RankOn("a"));
  Report("b", v1::RANK_STATE_EXITED, exit);
  const v1::Event stopping = EventOf(v1::EVENT_KIND_ATTEMPT_STATE);
  EXPECT_EQ(stopping.to(), "stopping");
  EXPECT_THAT(stopping.between(), ElementsAre("a", "b"));
  for (const char* worker : {"a", "b", "c"}) Report(worker, v1::RANK_STATE_RELEASED, exit);
  const v1::Event ended = EventOf(v1::EVENT_KIND_ATTEMPT_ENDED);
  EXPECT_EQ(ended.cause(), v1::CAUSE_NETWORK);
  EXPECT_THAT(ended.between(), ElementsAre("a", "b"));
}

TEST_F(ThreeWorkersTest, NetworkFailureOfTwoWorkersWhileAThirdIsLost_KeepsItsCause) {
  v1::RankExit exit;
  exit.set_cause(v1::CAUSE_NETWORK);
  exit.set_peer(RankOn("b"));
  Report("a", v1::RANK_STATE_EXITED, exit);
  Wait(config_.lost_after / 2);
  Report("a", v1::RANK_STATE_RELEASED, exit);
  Report("b", v1::RANK_STATE_RELEASED);
  EXPECT_EQ(Job().causes_size(), 0) << "the rank on c is not released";
  Wait(config_.lost_after / 2);
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_NETWORK);
  EXPECT_EQ(Job().causes(0).rank(), RankOn("a"));
  EXPECT_THAT(Job().causes(0).between(), ElementsAre("a", "b"));
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
  Wait(config_.partition_hold);
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

// Rank 1 does not make the call that rank 0 waits in; both stand at the same step.
TEST_F(CoreTest, HangInACollective_NamesTheRankThatIsBehind) {
  const v1::Job job = Train();
  for (uint64_t second = 0; absl::Seconds(second) < config_.progress_timeout; second += 2) {
    now_ += absl::Seconds(2);
    v1::Observed observed = Ranks(job, v1::RANK_STATE_TRAINING);
    for (int rank = 0; rank < 2; ++rank) {
      v1::RankProgress& progress =
          *observed.mutable_attempts(0)->mutable_ranks(rank)->mutable_progress();
      progress.set_step(5);
      progress.set_phase("training");
      progress.set_answers(1 + second);
      v1::GroupPosition& group = *progress.add_groups();
      group.set_group("dp");
      group.set_path("dp");
      group.set_calls(rank == 0 ? 8 : 7);
      if (rank == 0) group.mutable_unfinished()->set_number(7);
    }
    Observe(std::move(observed));
  }
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_HANG);
  EXPECT_EQ(Job().causes(0).rank(), 1);
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("rank 1 on w (training) is at fault: rank 0"));
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
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("no rank is behind the others"));
  EXPECT_THAT(Job().causes(0).message(), HasSubstr("allocating"));
  EXPECT_EQ(Job().causes(0).rank(), -1);
}

}  // namespace
}  // namespace muster::coordinator
