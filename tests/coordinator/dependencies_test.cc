// JobSpec.after: jobs that wait for the ends of others.
#include <string>
#include <vector>

#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::HasSubstr;

class DependenciesTest : public CoreTest {
 protected:
  // The status of the reply.
  absl::Status SubmitAfter(const std::string& name, const std::vector<std::string>& after) {
    v1::JobSpec spec = Spec();
    spec.set_name(name);
    spec.mutable_restart()->set_max_failures(0);
    for (const std::string& entry : after) spec.add_after(entry);
    Handle(SubmitEvent{CallId(1), spec, absl::StrCat("request ", ++requests_)});
    return Actions<ReplyAction>()[0].status;
  }
  v1::Job Of(const std::string& name) const { return core_->GetJob(name).value(); }
  // Ends a job that holds both slots of "w".
  void End(const std::string& name, v1::Cause cause) {
    const v1::Job job = Of(name);
    ASSERT_NE(job.state(), v1::JOB_STATE_QUEUED);
    Observe(Ranks(job, v1::RANK_STATE_PREPARED));
    Observe(Ranks(job, v1::RANK_STATE_TRAINING));
    Observe(Ranks(job, v1::RANK_STATE_TRAINING, {{0, cause}, {1, cause}}));
    Observe(Ranks(job, v1::RANK_STATE_RELEASED));
  }
  void Cancel(const std::string& name) { Handle(CancelEvent{CallId(9), name}); }

  int requests_ = 0;
};

TEST_F(DependenciesTest, JobWaitsForItsDependency_HoweverManySlotsAreFree) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {"first:succeeded"}));
  Hello();
  EXPECT_EQ(Of("first").state(), v1::JOB_STATE_PLACING);
  EXPECT_EQ(Of("second").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(WaitOf("second").code(), v1::WAIT_CODE_AFTER);
  ASSERT_EQ(WaitOf("second").after_size(), 1);
  EXPECT_EQ(WaitOf("second").after(0).job_id(), Of("first").id());
  EXPECT_EQ(WaitOf("second").after(0).condition(), v1::END_CONDITION_SUCCEEDED);
  End("first", v1::CAUSE_COMPLETED);
  EXPECT_EQ(Of("first").state(), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Of("second").state(), v1::JOB_STATE_PLACING);
}

TEST_F(DependenciesTest, EveryEntryMustHold) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {}));
  ASSERT_OK(SubmitAfter("third", {"first:ended", "second:ended", "first:succeeded"}));
  Hello();
  End("first", v1::CAUSE_COMPLETED);
  EXPECT_EQ(WaitOf("third").code(), v1::WAIT_CODE_AFTER);
  EXPECT_EQ(WaitOf("third").after_size(), 1);
  End("second", v1::CAUSE_USER_ERROR);
  EXPECT_EQ(Of("third").state(), v1::JOB_STATE_PLACING);
}

TEST_F(DependenciesTest, EndThatCannotComeAnyMore_FailsAllThatFollow) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {"first:succeeded"}));
  ASSERT_OK(SubmitAfter("third", {"second:succeeded"}));
  ASSERT_OK(SubmitAfter("rescue", {"second:failed"}));
  Hello();
  End("first", v1::CAUSE_USER_ERROR);
  EXPECT_EQ(Of("second").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Of("second").message(), HasSubstr(absl::StrCat("first (", Of("first").id(), ")")));
  EXPECT_THAT(Of("second").message(), HasSubstr("which has failed"));
  EXPECT_EQ(Of("third").state(), v1::JOB_STATE_FAILED);
  EXPECT_EQ(Of("third").attempts(), 0);
  EXPECT_EQ(Of("rescue").state(), v1::JOB_STATE_PLACING);
}

TEST_F(DependenciesTest, CancelledJob_CountsAsFailed) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("yes", {"first:failed"}));
  ASSERT_OK(SubmitAfter("no", {"first:succeeded"}));
  Cancel("first");
  EXPECT_NE(WaitOf("yes").code(), v1::WAIT_CODE_AFTER);
  EXPECT_EQ(Of("yes").state(), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Of("no").state(), v1::JOB_STATE_FAILED);
  EXPECT_THAT(Of("no").message(), HasSubstr("which was cancelled"));
}

TEST_F(DependenciesTest, CancelledWhileItWaits_NothingIsLeft) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {"first:succeeded"}));
  Cancel("second");
  EXPECT_EQ(Of("second").state(), v1::JOB_STATE_CANCELLED);
  Hello();
  End("first", v1::CAUSE_COMPLETED);
  EXPECT_EQ(Of("second").state(), v1::JOB_STATE_CANCELLED);
}

TEST_F(DependenciesTest, SurvivesARestart) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {"first:succeeded"}));
  Restart();
  EXPECT_EQ(WaitOf("second").code(), v1::WAIT_CODE_AFTER);
  Hello();
  End("first", v1::CAUSE_COMPLETED);
  EXPECT_EQ(Of("second").state(), v1::JOB_STATE_PLACING);
}

TEST_F(DependenciesTest, DependenciesAreLookedUpOnce_NewerJobsOfTheNameDoNotCount) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {"first:ended"}));
  Cancel("first");
  ASSERT_OK(SubmitAfter("first", {}));
  EXPECT_NE(WaitOf("second").code(), v1::WAIT_CODE_AFTER);
}

TEST_F(DependenciesTest, UnknownAndHopelessEntries_AreRefused) {
  EXPECT_THAT(SubmitAfter("second", {"first:succeeded"}),
              StatusIs(absl::StatusCode::kNotFound, HasSubstr("after[0]: ")));
  // A cycle would need a job that does not exist yet.
  EXPECT_THAT(SubmitAfter("second", {"second:ended"}), StatusIs(absl::StatusCode::kNotFound));
  ASSERT_OK(SubmitAfter("first", {}));
  Cancel("first");
  EXPECT_THAT(SubmitAfter("second", {"first:succeeded"}),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("which was cancelled")));
  EXPECT_OK(SubmitAfter("second", {"first:ended"}));
  EXPECT_NE(WaitOf("second").code(), v1::WAIT_CODE_AFTER);
}

TEST_F(DependenciesTest, Explain_SaysItOfJobsAndOfSpecs) {
  ASSERT_OK(SubmitAfter("first", {}));
  ASSERT_OK(SubmitAfter("second", {"first:succeeded"}));
  ASSERT_OK_AND_ASSIGN(const Explained job, core_->Explain(std::string("second"), now_));
  EXPECT_EQ(job.waiting->code(), v1::WAIT_CODE_AFTER);
  v1::JobSpec spec = Spec();
  spec.set_name("third");
  spec.add_after("second:ended");
  ASSERT_OK_AND_ASSIGN(const Explained planned, core_->Explain(spec, now_));
  EXPECT_EQ(planned.waiting->code(), v1::WAIT_CODE_AFTER);
  spec.set_after(0, "absent:ended");
  EXPECT_THAT(core_->Explain(spec, now_).status(), StatusIs(absl::StatusCode::kNotFound));
}

}  // namespace
}  // namespace muster::coordinator
