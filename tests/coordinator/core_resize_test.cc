#include <gtest/gtest.h>

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/spec/spec.h"
#include "tests/coordinator/core_fixture.h"
#include "tests/support/job_spec.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Elastic jobs on the two slots of "w", and on those of a second worker where a test adds one.
class ResizeTest : public CoreTest {
 protected:
  static v1::JobSpec Elastic(const std::string& name, int min, int max, int32_t priority = 50) {
    v1::JobSpec spec = testing::SmallJobSpec(name);
    spec.mutable_engine()->mutable_training()->set_global_batch(4);
    spec.set_priority(priority);
    spec.mutable_resources()->set_ranks(max);
    spec.mutable_resources()->mutable_rank_range()->set_min(min);
    spec.mutable_resources()->mutable_rank_range()->set_max(max);
    spec.mutable_checkpoint()->set_path("/checkpoints");
    spec.mutable_checkpoint()->set_every_steps(10);
    spec.mutable_preemption()->mutable_min_runtime()->set_seconds(0);
    spec.mutable_preemption()->mutable_grow_after()->set_seconds(60);
    spec::ApplyDefaults(spec);
    EXPECT_OK(spec::Validate(spec));
    return spec;
  }
  ReplyAction SubmitSpec(const v1::JobSpec& spec) {
    Handle(SubmitEvent{CallId(1), spec, spec.name()});
    Follow();
    return Actions<ReplyAction>()[0];
  }
  ReplyAction Resize(const std::string& job, int32_t ranks) {
    ChangeJobEvent event;
    event.call = CallId(3);
    event.job = job;
    event.change = ChangeJobEvent::Change::kResize;
    event.caller = "client test";
    event.ranks = ranks;
    Handle(event);
    Follow();
    return Actions<ReplyAction>()[0];
  }
  void Follow() {
    if (const auto desired = LastDesired()) revision_ = desired->revision();
  }
  v1::Job Get(const std::string& name) const { return core_->GetJob(name).value(); }
  // Reports all ranks of the job in this state, and those of other jobs as they were last reported.
  void Report(const v1::Job& job, v1::RankState state, v1::Cause cause = v1::CAUSE_UNSPECIFIED) {
    reported_[job.id()] = Ranks(job, state, cause);
    Observe(All());
  }
  v1::Observed All() const {
    v1::Observed observed;
    for (const auto& [id, attempt] : reported_) {
      const v1::Job job = Get(id);
      if (job.epoch() != attempt.epoch() || job.attempt_state() == v1::ATTEMPT_STATE_RELEASED) {
        continue;
      }
      *observed.add_attempts() = attempt;
    }
    return observed;
  }
  static v1::ObservedAttempt Ranks(const v1::Job& job, v1::RankState state, v1::Cause cause) {
    v1::ObservedAttempt attempt;
    attempt.set_job_id(job.id());
    attempt.set_epoch(job.epoch());
    for (int i = 0; i < job.ranks_size(); ++i) {
      v1::ObservedRank& rank = *attempt.add_ranks();
      rank.set_rank(i);
      rank.set_state(state);
      if (cause != v1::CAUSE_UNSPECIFIED) rank.mutable_exit()->set_cause(cause);
    }
    return attempt;
  }
  void Train(const std::string& name) {
    Report(Get(name), v1::RANK_STATE_PREPARED);
    Report(Get(name), v1::RANK_STATE_TRAINING);
    ASSERT_EQ(Get(name).state(), v1::JOB_STATE_RUNNING);
  }

  std::map<std::string, v1::ObservedAttempt> reported_;  // by job
};

TEST_F(ResizeTest, Start_TakesTheLargestSizeThatFits) {
  Hello();
  SubmitSpec(Elastic("job", 1, 4));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().ranks_size(), 2);
  EXPECT_THAT(Job().sizes(), ElementsAre(1, 2, 4));
  // Its ranks are told the layout of that size.
  const auto desired = LastDesired();
  ASSERT_TRUE(desired.has_value());
  const v1::RankAssignment& rank = desired->attempts(0).ranks(0);
  const v1::JobSpec& sent =
      desired->attempts(0).has_spec() ? desired->attempts(0).spec() : rank.spec();
  EXPECT_EQ(rank.world_size(), 2);
  EXPECT_EQ(sent.resources().ranks(), 2);
  EXPECT_EQ(sent.engine().parallel().data(), 2);
  EXPECT_FALSE(sent.resources().has_rank_range());
}

TEST_F(ResizeTest, JobThatStopsToResize_DoesNotLoseTheSlotsThatItStillHolds) {
  SessionOpened hello = HelloOf("w", 4);
  session_ = hello.session;
  Handle(hello);
  Follow();
  SubmitSpec(Elastic("job", 1, 4, 10));
  Train("job");
  const v1::Job before = Job();
  ASSERT_EQ(before.ranks_size(), 4);
  EXPECT_OK(Resize("job", 2).status);
  v1::JobSpec low = Spec(1);
  low.set_name("low");
  low.set_priority(5);
  SubmitSpec(low);
  v1::JobSpec urgent = Spec(3);
  urgent.set_name("urgent");
  urgent.set_priority(90);
  SubmitSpec(urgent);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RESIZING);
  EXPECT_EQ(Get("low").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Get("urgent").state(), v1::JOB_STATE_QUEUED);
  Report(before, v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  EXPECT_NE(Job().state(), v1::JOB_STATE_RESIZING);
}

TEST_F(ResizeTest, TooSmallACluster_IsWaitedForWithTheSmallestSize) {
  SubmitSpec(Elastic("job", 2, 4));
  EXPECT_EQ(WaitOf("job").ranks(), 2);
  Hello();
  EXPECT_EQ(Job().ranks_size(), 2);
}

TEST_F(ResizeTest, Resize_StopsWithACheckpointAndGoesOnWithTheOtherSize) {
  Hello();
  SubmitSpec(Elastic("job", 1, 2));
  Train("job");
  const v1::Job before = Job();
  const ReplyAction reply = Resize("job", 1);
  EXPECT_OK(reply.status);
  EXPECT_EQ(reply.job.state(), v1::JOB_STATE_RESIZING);
  EXPECT_EQ(Commit(before, 17), 0);
  // The slot that it keeps outlives the coordinator.
  Restart();
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RESIZING);
  Hello(1, All());
  Report(before, v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  const v1::Job after = Job();
  EXPECT_EQ(after.state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(after.ranks_size(), 1);
  EXPECT_EQ(after.ranks_wanted(), 1);
  EXPECT_EQ(after.failures(), 0);
  ASSERT_EQ(after.causes_size(), 1);
  EXPECT_EQ(after.causes(0).cause(), v1::CAUSE_RESIZED);
  EXPECT_FALSE(after.causes(0).counted());
  // It keeps that size until its user says otherwise.
  Train("job");
  for (int i = 0; i < 90; ++i) {
    Wait(absl::Seconds(1));
    Report(Job(), v1::RANK_STATE_TRAINING);
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Resize("job", 0).job.state(), v1::JOB_STATE_RESIZING);
  Report(Job(), v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  EXPECT_EQ(Job().ranks_size(), 2);
}

TEST_F(ResizeTest, ShrinkForALargerPriority_GivesBackOnceThatHasEnded) {
  Hello();
  SubmitSpec(Elastic("job", 1, 2, 10));
  Train("job");
  const v1::Job before = Job();
  v1::JobSpec urgent = Spec(1);
  urgent.set_name("urgent");
  urgent.set_priority(90);
  SubmitSpec(urgent);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RESIZING);
  EXPECT_EQ(WaitOf("urgent").code(), v1::WAIT_CODE_SLOTS_KEPT);
  Report(before, v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  EXPECT_EQ(Get("urgent").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Job().ranks_size(), 1);
  Train("job");
  Handle(CancelEvent{CallId(4), "urgent"});
  Follow();
  Report(Get("urgent"), v1::RANK_STATE_RELEASED, v1::CAUSE_CANCELLED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RUNNING) << "it has just been resized";
  for (int i = 0; i < 62 && Job().state() == v1::JOB_STATE_RUNNING; ++i) {
    Wait(absl::Seconds(1));
    if (Job().state() == v1::JOB_STATE_RUNNING) Report(Job(), v1::RANK_STATE_TRAINING);
  }
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RESIZING);
  Report(Job(), v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  EXPECT_EQ(Job().ranks_size(), 2);
}

TEST_F(ResizeTest, CancelAndSuspendWhileItIsResized_GiveTheSlotsUp) {
  Hello();
  SubmitSpec(Elastic("job", 1, 2));
  Train("job");
  Resize("job", 1);
  const v1::Job resizing = Job();
  ChangeJobEvent suspend;
  suspend.call = CallId(5);
  suspend.job = "job";
  suspend.change = ChangeJobEvent::Change::kSuspend;
  suspend.caller = "client test";
  Handle(suspend);
  Report(resizing, v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_HELD);
  suspend.change = ChangeJobEvent::Change::kRelease;
  Handle(suspend);
  Follow();
  EXPECT_EQ(Job().ranks_size(), 1);
  Train("job");
  Resize("job", 2);
  const v1::Job again = Job();
  EXPECT_EQ(again.state(), v1::JOB_STATE_RESIZING);
  Handle(CancelEvent{CallId(4), "job"});
  Follow();
  Report(again, v1::RANK_STATE_RELEASED, v1::CAUSE_RESIZED);
  EXPECT_EQ(Job().state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(ResizeTest, SizeThatDoesNotFit_IsHadLater) {
  Hello();
  SubmitSpec(Elastic("job", 1, 4));
  Train("job");
  EXPECT_EQ(Resize("job", 4).job.state(), v1::JOB_STATE_RUNNING);
  EXPECT_EQ(Job().ranks_wanted(), 4);
  Handle(HelloOf("other", 2));
  EXPECT_EQ(Job().state(), v1::JOB_STATE_RESIZING);
}

TEST_F(ResizeTest, RequestsThatMakeNoSense_AreRefusedWithWhatWouldDo) {
  Hello();
  v1::JobSpec rigid = Spec(1);
  rigid.set_name("rigid");
  SubmitSpec(rigid);
  EXPECT_THAT(std::string(Resize("rigid", 2).status.message()), HasSubstr("is not elastic"));
  v1::JobSpec unsaved = Elastic("unsaved", 1, 2);
  unsaved.clear_checkpoint();
  SubmitSpec(unsaved);
  EXPECT_EQ(Resize("unsaved", 3).status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(Resize("unsaved", 3).status.message()), HasSubstr("it can with 1, 2"));
  EXPECT_THAT(std::string(Resize("unsaved", 2).status.message()), HasSubstr("no `checkpoint`"));
  EXPECT_OK(Resize("unsaved", 1).status) << "as it is";
  EXPECT_EQ(Resize("nobody", 1).status.code(), absl::StatusCode::kNotFound);
}

}  // namespace
}  // namespace muster::coordinator
