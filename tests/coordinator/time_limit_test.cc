// JobSpec.time_limit: running time is counted over attempts, and ends the job.
#include "proto/time.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

class TimeLimitTest : public CoreTest {
 protected:
  static constexpr absl::Duration kLimit = absl::Seconds(100);

  void SubmitLimited() {
    v1::JobSpec spec = Spec();
    spec.mutable_time_limit()->set_seconds(absl::ToInt64Seconds(kLimit));
    spec.mutable_restart()->set_max_failures(5);
    Handle(SubmitEvent{CallId(1), spec, "r"});
    ASSERT_OK(Actions<ReplyAction>()[0].status);
  }
  void Launch() {
    Observe(Ranks(Job(), v1::RANK_STATE_PREPARED));
    Observe(Ranks(Job(), v1::RANK_STATE_TRAINING));
  }
  // Lets time pass in which the ranks advance, so that nothing else ends the attempt.
  void RunFor(absl::Duration time) {
    for (const absl::Time until = now_ + time; now_ < until;) {
      Wait(std::min(absl::Seconds(2), until - now_));
      if (!Job().has_running_since()) return;
      v1::Observed observed = Ranks(Job(), v1::RANK_STATE_TRAINING);
      for (v1::ObservedRank& rank : *observed.mutable_attempts(0)->mutable_ranks()) {
        rank.mutable_progress()->set_step(++step_);
      }
      Observe(std::move(observed));
    }
  }

  int64_t step_ = 0;
};

TEST_F(TimeLimitTest, TimeInTheQueue_DoesNotCount) {
  SubmitLimited();
  Wait(2 * kLimit);
  Hello();
  Launch();
  RunFor(kLimit - absl::Seconds(10));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
}

TEST_F(TimeLimitTest, JobThatRunsForIt_IsStoppedAndFails) {
  Hello();
  SubmitLimited();
  Launch();
  RunFor(kLimit + absl::Seconds(1));
  ASSERT_TRUE(LastDesired().has_value());
  EXPECT_EQ(LastDesired()->attempts(0).phase(), v1::DESIRED_PHASE_STOPPED);
  EXPECT_EQ(FromProto(Job().ran()), kLimit);
  EXPECT_FALSE(Job().has_running_since());
  Observe(Ranks(Job(), v1::RANK_STATE_RELEASED));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_FAILED);
  ASSERT_EQ(Job().causes_size(), 1);
  EXPECT_EQ(Job().causes(0).cause(), v1::CAUSE_TIME_LIMIT);
  EXPECT_THAT(Job().message(), HasSubstr("it has run for its time_limit, 1m40s"));
}

TEST_F(TimeLimitTest, AttemptsCountTogether_AndARestartOfTheCoordinatorForgetsNothing) {
  Hello();
  SubmitLimited();
  Launch();
  RunFor(absl::Seconds(60));
  const v1::Job first = Job();
  Observe(Ranks(first, v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  Observe(Ranks(first, v1::RANK_STATE_RELEASED));
  EXPECT_EQ(FromProto(Job().ran()), absl::Seconds(60));
  Wait(absl::Seconds(2));  // the back-off
  Launch();
  ASSERT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  RunFor(absl::Seconds(20));
  Restart();
  Hello(2, Ranks(Job(), v1::RANK_STATE_TRAINING));
  EXPECT_EQ(FromProto(Job().ran()), absl::Seconds(60));
  RunFor(absl::Seconds(15));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  RunFor(absl::Seconds(10));
  EXPECT_FALSE(Job().has_running_since());
  EXPECT_EQ(FromProto(Job().ran()), kLimit);
}

TEST_F(TimeLimitTest, ClockThatIsSetBack_TakesNothingAway) {
  Hello();
  SubmitLimited();
  Launch();
  now_ -= absl::Hours(1);
  Restart();
  Hello(2, Ranks(Job(), v1::RANK_STATE_TRAINING));
  Observe(Ranks(Job(), v1::RANK_STATE_TRAINING, {{0, v1::CAUSE_CRASH}}));
  EXPECT_EQ(FromProto(Job().ran()), absl::ZeroDuration());
}

// The queue can use the limit before a job has ever run: a job behind it knows when it ends.
TEST_F(TimeLimitTest, LimitBoundsTheEstimateOfJobsBehindIt) {
  Hello();
  SubmitLimited();
  Launch();
  v1::JobSpec second = Spec();
  second.set_name("second");
  Handle(SubmitEvent{CallId(2), second, "s"});
  ASSERT_OK_AND_ASSIGN(const Explained explained, core_->Explain(std::string("second"), now_));
  ASSERT_TRUE(explained.waiting.has_value());
  ASSERT_TRUE(explained.waiting->has_estimated_start());
  EXPECT_LE(FromProto(explained.waiting->estimated_start()), now_ + kLimit);
}

// Users see which slots are set aside for the first job of a queue. The log does not grow by it.
TEST_F(TimeLimitTest, SlotsAreSetAsideForTheJobBehindIt_AndNothingOfThatIsStored) {
  Hello();
  SubmitLimited();
  Launch();
  v1::JobSpec second = Spec();
  second.set_name("second");
  Handle(SubmitEvent{CallId(2), second, "s"});
  const v1::SetAside set_aside = core_->GetJob("second")->waiting().set_aside();
  ASSERT_EQ(set_aside.workers_size(), 1);
  EXPECT_EQ(set_aside.workers(0).worker(), "w");
  EXPECT_EQ(set_aside.slots(), 2);
  EXPECT_LE(FromProto(set_aside.starts_at()), now_ + kLimit);
  ASSERT_OK_AND_ASSIGN(const Explained explained, core_->Explain(std::string("second"), now_));
  EXPECT_EQ(explained.waiting->set_aside().slots(), 2);
  const v1::GetQueuesResponse queues = core_->GetQueues(now_);
  ASSERT_EQ(queues.heads_size(), 1);
  EXPECT_EQ(queues.heads(0).job().job_name(), "second");
  EXPECT_EQ(queues.heads(0).queue(), "default");
  EXPECT_EQ(queues.heads(0).set_aside().slots(), 2);
  EXPECT_FALSE(core_->WouldDecide(now_));
  // A plan that decides nothing else leaves nothing in the log.
  v1::JobSpec third = Spec();
  third.set_name("third");
  const CoreOutput output = core_->Handle(SubmitEvent{CallId(3), third, "t"}, now_);
  for (const Batch::Change& row : output.batch.changes) {
    v1::LogEntry entry;
    if (row.table != Table::kLog || !entry.ParseFromString(row.value.value_or(""))) continue;
    EXPECT_THAT(entry.plans(), ::testing::IsEmpty());
  }
  ASSERT_OK(store_->Write({output.batch}));
  Handle(CancelEvent{CallId(4), "second"});
  const v1::GetQueuesResponse later = core_->GetQueues(now_);
  for (const v1::HeadOfQueue& head : later.heads()) {
    EXPECT_EQ(head.job().job_name(), "third");
  }
}

}  // namespace
}  // namespace muster::coordinator
