// JobSpec.deadline: a job that has not ended by then ends, and its queue serves earlier ones first.
#include "coordinator/core/causes.h"
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

class DeadlineTest : public CoreTest {
 protected:
  absl::Status SubmitUntil(const std::string& name, const std::string& deadline, int ranks = 2) {
    v1::JobSpec spec = Spec(ranks);
    spec.set_name(name);
    spec.set_deadline(deadline);
    spec.mutable_restart()->set_max_failures(5);
    spec.mutable_preemption()->mutable_grace()->set_seconds(42);
    Handle(SubmitEvent{CallId(1), spec, ""});
    return Actions<ReplyAction>()[0].status;
  }
  void Launch() {
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  }
  v1::JobState StateOf(const std::string& name) const { return core_->GetJob(name)->state(); }
};

TEST_F(DeadlineTest, DurationFromSubmission_IsStoredAsATime) {
  ASSERT_OK(SubmitUntil("job", "1h"));
  EXPECT_EQ(Job().spec().deadline(), "1970-01-01T01:16:40Z");
  ASSERT_OK(SubmitUntil("other", "1970-01-01T02:00:00.5+01:00"));
  EXPECT_EQ(core_->GetJob("other")->spec().deadline(), "1970-01-01T01:00:00.5Z");
}

TEST_F(DeadlineTest, DeadlineInThePast_IsRefused) {
  const absl::Status past = SubmitUntil("job", "1970-01-01T00:16:40Z");
  EXPECT_EQ(past.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(past.message(),
              HasSubstr("deadline: '1970-01-01T00:16:40Z' is not later than the submission, "
                        "1970-01-01T00:16:40Z"));
  EXPECT_EQ(core_->GetJob("job").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(DeadlineTest, JobThatRuns_IsStoppedWithinItsGrace_AndFailsForIt) {
  Hello();
  ASSERT_OK(SubmitUntil("job", "100s"));
  Launch();
  Wait(absl::Seconds(99));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_RUNNING);
  Wait(absl::Seconds(1));
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_STOPPED);
  EXPECT_EQ(LastDesired()->attempts(0).stop_grace_ms(), 42'000);
  EXPECT_EQ(Commit(Job(), 17), 0);  // the checkpoint of the step at whose end it stops
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED, {{0, v1::CAUSE_PREEMPTED}}));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Job().last_committed_step(), 17);
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_DEADLINE);
  EXPECT_FALSE(Job().causes(0).counted());
  EXPECT_EQ(Job().message(), "deadline: it had not ended by its deadline, 1970-01-01T00:18:20Z");
}

TEST_F(DeadlineTest, JobThatWaits_FailsAtItsDeadlineAndNotBefore) {
  ASSERT_OK(SubmitUntil("job", "100s"));
  Wait(absl::Seconds(99));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_QUEUED);
  Restart();  // sets the timer again
  Wait(absl::Seconds(1));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Job().message(), StartsWith("deadline: "));
  EXPECT_TRUE(Job().causes().empty());
}

TEST_F(DeadlineTest, DeadlineWhileTheCoordinatorIsDown_EndsTheJobAtItsReturn) {
  ASSERT_OK(SubmitUntil("job", "100s"));
  now_ += absl::Hours(1);
  Restart();
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_FAILED);
}

TEST_F(DeadlineTest, JobThatIsHeldOrWaitsForOthers_FailsToo) {
  Hello();
  Submit();
  v1::JobSpec after = Spec();
  after.set_name("after");
  after.add_after("job:succeeded");
  after.set_deadline("50s");
  Handle(SubmitEvent{CallId(2), after, ""});
  ASSERT_OK(SubmitUntil("held", "50s"));
  Handle(ChangeJobEvent{CallId(3), "held", ChangeJobEvent::Change::kHold});
  ASSERT_EQ(StateOf("held"), v1::JOB_STATE_HELD);
  Wait(absl::Seconds(50));
  EXPECT_EQ(StateOf("after"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(StateOf("held"), v1::JOB_STATE_FAILED);
}

TEST_F(DeadlineTest, JobThatStopsForAnotherReason_FailsOnceItsDevicesAreReleased) {
  Hello();
  ASSERT_OK(SubmitUntil("job", "20s"));
  Launch();
  Handle(ChangeJobEvent{CallId(3), "job", ChangeJobEvent::Change::kPreempt});
  const v1::Job stopping = Job();
  Wait(absl::Seconds(20));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_PREEMPTING);
  Observe(Ranks(stopping, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Job().message(), StartsWith("deadline: "));
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_PREEMPTED);
}

TEST_F(DeadlineTest, AmongEqualPriorities_TheEarlierDeadlineGoesFirst) {
  ASSERT_OK(SubmitUntil("never", ""));
  ASSERT_OK(SubmitUntil("late", "2h"));
  ASSERT_OK(SubmitUntil("early", "1h"));
  v1::JobSpec high = Spec();
  high.set_name("high");
  high.set_priority(60);
  Handle(SubmitEvent{CallId(2), high, ""});
  std::vector<int64_t> ahead;
  for (const char* name : {"high", "early", "late", "never"}) {
    ahead.push_back(core_->Explain(std::string(name), now_)->waiting->ahead());
  }
  EXPECT_THAT(ahead, ::testing::ElementsAre(0, 1, 2, 3));
}

TEST_F(DeadlineTest, Outlook_SaysByHowMuchAJobMissesIt) {
  Hello();
  ASSERT_OK(SubmitUntil("job", "100s"));
  ASSERT_OK_AND_ASSIGN(Explained explained, core_->Explain(std::string("job"), now_));
  ASSERT_TRUE(explained.deadline.has_value());
  EXPECT_FALSE(explained.deadline->has_expected_end()) << "it has not trained yet";
  Launch();
  v1::Observed observed = Ranks(Job(), v1::RANK_STATE_TRAINING);
  for (v1::ObservedRank& rank : *observed.mutable_attempts(0)->mutable_ranks()) {
    rank.mutable_progress()->set_step(10);
    rank.mutable_progress()->set_step_seconds(2);
  }
  Observe(std::move(observed));
  ASSERT_OK_AND_ASSIGN(explained, core_->Explain(std::string("job"), now_));
  ASSERT_TRUE(explained.deadline->has_expected_end());
  EXPECT_FALSE(explained.deadline->by_time_limit());
  EXPECT_EQ(FromProto(explained.deadline->expected_end()), now_ + absl::Seconds(180));
  EXPECT_EQ(FromProto(explained.deadline->deadline()), now_ + absl::Seconds(100));
}

TEST_F(DeadlineTest, OutlookOfASpec_RestsOnTheEstimatedStartAndItsTimeLimit) {
  Hello();
  v1::JobSpec first = Spec();
  first.mutable_time_limit()->set_seconds(60);
  Handle(SubmitEvent{CallId(1), first, ""});
  Launch();
  v1::JobSpec spec = Spec();
  spec.set_name("second");
  spec.set_deadline("90s");
  spec.mutable_time_limit()->set_seconds(50);
  ASSERT_OK_AND_ASSIGN(const Explained explained, core_->Explain(spec, now_));
  ASSERT_TRUE(explained.deadline.has_value());
  EXPECT_TRUE(explained.deadline->by_time_limit());
  EXPECT_TRUE(explained.deadline->start_known());
  EXPECT_GE(FromProto(explained.deadline->expected_end()), now_ + absl::Seconds(110));
  spec.set_deadline("1970-01-01T00:00:00Z");
  EXPECT_EQ(core_->Explain(spec, now_).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DeadlineTest, CancelledJob_StaysCancelled) {
  Hello();
  ASSERT_OK(SubmitUntil("job", "10s"));
  Launch();
  const v1::Job running = Job();
  Handle(CancelEvent{CallId(2), "job"});
  Wait(absl::Seconds(12));
  Observe(Ranks(running, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(StateOf("job"), v1::JOB_STATE_CANCELLED);
}

}  // namespace
}  // namespace muster::coordinator
