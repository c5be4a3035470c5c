#include <gtest/gtest.h>

#include <string>

#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using Change = ChangeJobEvent::Change;

class PreemptionTest : public CoreTest {
 protected:
  v1::Job SubmitUrgent(int32_t priority = 90) {
    v1::JobSpec spec = Spec();
    spec.set_name("urgent");
    spec.set_priority(priority);
    Handle(SubmitEvent{CallId(2), spec, "urgent"});
    return Actions<ReplyAction>()[0].job;
  }
  ReplyAction ChangeJob(const std::string& job, Change change) {
    ChangeJobEvent event;
    event.call = CallId(3);
    event.job = job;
    event.change = change;
    event.caller = "client test";
    Handle(event);
    if (const auto desired = LastDesired()) revision_ = desired->revision();
    return Actions<ReplyAction>()[0];
  }
  v1::Job Urgent() const { return core_->GetJob("urgent").value(); }
  void RanksEnd(const v1::Job& job, v1::Cause cause) {
    Observe(Ranks(job, v1::RANK_STATE_RELEASED, {{0, cause}, {1, cause}}));
  }
};

TEST_F(PreemptionTest, LargerPriority_GetsTheSlotsOnceTheVictimHasSavedAndEnded) {
  const v1::Job victim = Train();
  EXPECT_EQ(Commit(victim, 10), 0);
  SubmitUrgent();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PREEMPTING);
  EXPECT_EQ(Urgent().state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WaitOf("urgent").code(), v1::WAIT_CODE_SLOTS_KEPT);
  EXPECT_EQ(WaitOf("urgent").stopping(0).job_name(), "job");
  // What it saves at the boundary counts, although the attempt is being stopped.
  EXPECT_EQ(Commit(victim, 17), 0);
  RanksEnd(victim, v1::CAUSE_PREEMPTED);
  EXPECT_EQ(Urgent().state(), v1::JOB_STATE_PLACING);
  const v1::Job after = Job();
  EXPECT_EQ(after.state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(after.last_committed_step(), 17);
  EXPECT_EQ(after.failures(), 0);
  ASSERT_EQ(after.causes_size(), 1);
  EXPECT_EQ(after.causes(0).cause(), v1::CAUSE_PREEMPTED);
  EXPECT_FALSE(after.causes(0).counted());
}

TEST_F(PreemptionTest, Victim_IsAskedToStopWithItsOwnGrace) {
  Hello();
  v1::JobSpec spec = Spec();
  spec.mutable_preemption()->mutable_grace()->set_seconds(45);
  Handle(SubmitEvent{CallId(1), spec, "r"});
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  SubmitUrgent();
  const std::optional<v1::Desired> desired = LastDesired();
  ASSERT_TRUE(desired.has_value());
  ASSERT_EQ(desired->attempts_size(), 1);
  EXPECT_EQ(desired->attempts(0).phase(), v1::DESIRED_PHASE_STOPPED);
  EXPECT_EQ(desired->attempts(0).stop_grace_ms(), 45'000);
}

TEST_F(PreemptionTest, EqualPriority_Waits) {
  Train();
  SubmitUrgent(50);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(WaitOf("urgent").code(), v1::WAIT_CODE_SLOTS_TAKEN);
}

TEST_F(PreemptionTest, MinRuntime_IsWaitedFor) {
  Hello();
  v1::JobSpec spec = Spec();
  spec.mutable_preemption()->mutable_min_runtime()->set_seconds(20);
  Handle(SubmitEvent{CallId(1), spec, "r"});
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  SubmitUrgent();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  for (int i = 0; i < 19; ++i) {
    Wait(absl::Seconds(1));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  Wait(absl::Seconds(2));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PREEMPTING);
}

TEST_F(PreemptionTest, CoordinatorRestart_KeepsTheSlotsForTheWinner) {
  const v1::Job victim = Train();
  SubmitUrgent();
  Restart();
  EXPECT_EQ(WaitOf("urgent").code(), v1::WAIT_CODE_SLOTS_KEPT);
  Hello(1, Ranks(victim, v1::RANK_STATE_RELEASED,
                 {{0, v1::CAUSE_PREEMPTED}, {1, v1::CAUSE_PREEMPTED}}));
  EXPECT_EQ(Urgent().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_QUEUED);
}

TEST_F(PreemptionTest, WinnerThatIsCancelled_LeavesTheSlotsToTheVictim) {
  const v1::Job victim = Train();
  SubmitUrgent();
  Handle(CancelEvent{CallId(4), "urgent"});
  RanksEnd(victim, v1::CAUSE_PREEMPTED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().attempts(), 2);
}

TEST_F(PreemptionTest, JobThatFinishesMeanwhile_HasSucceeded) {
  const v1::Job victim = Train();
  SubmitUrgent();
  RanksEnd(victim, v1::CAUSE_COMPLETED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_SUCCEEDED);
}

TEST_F(PreemptionTest, Cancel_OfAJobThatIsBeingPreempted_EndsIt) {
  const v1::Job victim = Train();
  EXPECT_OK(ChangeJob("job", Change::kPreempt).status);
  Handle(CancelEvent{CallId(4), "job"});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_STOPPING);
  RanksEnd(victim, v1::CAUSE_PREEMPTED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(PreemptionTest, SuspendedJob_IsHeldUntilItIsResumed) {
  const v1::Job job = Train();
  EXPECT_EQ(ChangeJob("job", Change::kSuspend).job.state(), v1::JOB_STATE_PREEMPTING);
  RanksEnd(job, v1::CAUSE_PREEMPTED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_HELD);
  EXPECT_EQ(WaitOf("job").code(), v1::WAIT_CODE_HELD);
  EXPECT_EQ(WaitOf("job").held_by(), "client test");
  Restart();
  EXPECT_EQ(WaitOf("job").held_by(), "client test");
  Hello();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_HELD);
  ChangeJob("job", Change::kRelease);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().failures(), 0);
}

TEST_F(PreemptionTest, HeldJob_DoesNotStartAndHoldsBackNone) {
  Submit();
  EXPECT_EQ(ChangeJob("job", Change::kHold).job.state(), v1::JOB_STATE_HELD);
  SubmitUrgent(10);
  Hello();
  EXPECT_EQ(Urgent().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_HELD);
  Handle(CancelEvent{CallId(4), "job"});
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(PreemptionTest, HoldOfAJobThatFails_ComesIntoForceAfterItsRelease) {
  const v1::Job job = Train();
  Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  ASSERT_EQ(Job().state(), v1::JOB_STATE_RECOVERING);
  EXPECT_OK(ChangeJob("job", Change::kHold).status);
  RanksEnd(job, v1::CAUSE_CRASH);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_HELD);
  EXPECT_EQ(Job().failures(), 1);
}

TEST_F(PreemptionTest, Requeue_StopsNowAndEndsABackOff) {
  const v1::Job job = Train();
  EXPECT_EQ(ChangeJob("job", Change::kRequeue).job.state(), v1::JOB_STATE_PREEMPTING);
  RanksEnd(job, v1::CAUSE_CANCELLED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().failures(), 0);
  Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  const v1::Job second = Job();
  RanksEnd(second, v1::CAUSE_CRASH);
  ASSERT_EQ(WaitOf("job").code(), v1::WAIT_CODE_BACK_OFF);
  EXPECT_EQ(ChangeJob("job", Change::kRequeue).job.state(), v1::JOB_STATE_PLACING);
}

TEST_F(PreemptionTest, ChangesThatMakeNoSense_AreRefusedWithTheStateAndWhatToDo) {
  Submit();
  const absl::Status preempt = ChangeJob("job", Change::kPreempt).status;
  EXPECT_EQ(preempt.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(preempt.message()), ::testing::HasSubstr("queued"));
  Hello();
  const absl::Status hold = ChangeJob("job", Change::kHold).status;
  EXPECT_THAT(std::string(hold.message()), ::testing::HasSubstr("muster suspend job"));
  Handle(CancelEvent{CallId(4), "job"});
  EXPECT_EQ(ChangeJob("job", Change::kSuspend).status.code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ChangeJob("nobody", Change::kHold).status.code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace muster::coordinator
