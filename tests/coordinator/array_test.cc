// Arrays: submitted as one, so many tasks at a time, changed as one, waited for as one.
#include "coordinator/core/arrays.h"

#include "proto/spec/array.h"
#include "tests/coordinator/core_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class ArrayTest : public CoreTest {
 protected:
  static std::vector<v1::JobSpec> Tasks(int count, int max_running, const std::string& name = "a") {
    std::vector<v1::JobSpec> tasks;
    for (int i = 0; i < count; ++i) {
      v1::JobSpec& spec = tasks.emplace_back(Spec(1));
      spec.set_name(absl::StrCat(name, "-", i));
      (*spec.mutable_labels())[spec::kArrayLabel] = name;
      (*spec.mutable_labels())[spec::kArrayIndexLabel] = absl::StrCat(i);
      spec.mutable_array_task()->set_array(name);
      spec.mutable_array_task()->set_index(i);
      spec.mutable_array_task()->set_tasks(count);
      spec.mutable_array_task()->set_max_running(max_running);
    }
    return tasks;
  }
  ReplyAction SubmitArray(std::vector<v1::JobSpec> tasks, const std::string& request = "") {
    Handle(SubmitArrayEvent{CallId(1), std::move(tasks), request, {}});
    return Actions<ReplyAction>()[0];
  }
  ReplyAction Change(std::optional<ChangeJobEvent::Change> change, const std::string& name = "a") {
    Handle(ChangeArrayEvent{CallId(2), name, change, "", {}});
    return Actions<ReplyAction>()[0];
  }
  void End(const std::string& name, v1::Cause cause) {
    const v1::Job job = core_->GetJob(name).value();
    Observe(WithOthers(job, Ranks(job, v1::RANK_STATE_PREPARED)));
    Observe(WithOthers(job, Ranks(job, v1::RANK_STATE_TRAINING)));
    Observe(WithOthers(job, Ranks(job, v1::RANK_STATE_RELEASED, {{0, cause}})));
  }
  // A report has every attempt that the daemon holds.
  v1::Observed WithOthers(const v1::Job& job, v1::Observed observed) const {
    uint64_t next = 0;
    for (const v1::Job& other : core_->ListJobs(0, 100, &next)) {
      if (other.id() == job.id() || other.attempt_state() == v1::ATTEMPT_STATE_UNSPECIFIED ||
          other.attempt_state() == v1::ATTEMPT_STATE_RELEASED) {
        continue;
      }
      observed.MergeFrom(Ranks(other, std::max(other.ranks(0).state(), v1::RANK_STATE_PREPARED)));
    }
    return observed;
  }
  v1::JobState StateOf(const std::string& name) const { return core_->GetJob(name)->state(); }
  std::vector<v1::WaitCode> Codes(int count) const {
    std::vector<v1::WaitCode> codes;
    for (int i = 0; i < count; ++i) {
      codes.push_back(core_->GetJob(absl::StrCat("a-", i))->waiting().code());
    }
    return codes;
  }
};

TEST_F(ArrayTest, Submission_IsAllOrNothing) {
  Submit();  // "job"
  std::vector<v1::JobSpec> tasks = Tasks(3, 0);
  tasks[2].set_queue("nowhere");
  const ReplyAction refused = SubmitArray(tasks);
  EXPECT_FALSE(refused.status.ok());
  EXPECT_THAT(refused.status.message(), HasSubstr("task 2: "));
  EXPECT_FALSE(core_->GetJob("a-0").ok());
  const ReplyAction accepted = SubmitArray(Tasks(3, 0));
  ASSERT_OK(accepted.status);
  EXPECT_EQ(accepted.array.tasks(), 3);
  EXPECT_EQ(accepted.array.changed(), 3);
  EXPECT_EQ(core_->GetJob("a-2")->spec().array_task().array_id(), accepted.array.array_id());
}

TEST_F(ArrayTest, RequestId_MakesOneArray_AlsoAcrossARestart) {
  const std::string id = SubmitArray(Tasks(3, 0), "r").array.array_id();
  Restart();
  const ReplyAction again = SubmitArray(Tasks(3, 0), "r");
  ASSERT_OK(again.status);
  EXPECT_TRUE(again.existed);
  EXPECT_EQ(again.array.array_id(), id);
  EXPECT_EQ(SubmitArray(Tasks(3, 0), "other").status.code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(ArrayTest, NameOfALiveArray_IsNotAJobs_AndNeitherTheOtherWayRound) {
  SubmitArray(Tasks(2, 0, "job"));
  Handle(SubmitEvent{CallId(1), Spec(), ""});
  EXPECT_EQ(Actions<ReplyAction>()[0].status.code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(Actions<ReplyAction>()[0].status.message(), HasSubstr("2 task(s) of the array"));
  Change(std::nullopt, "job");
  Submit();
  EXPECT_EQ(SubmitArray(Tasks(2, 0, "job")).status.code(), absl::StatusCode::kAlreadyExists);
}

TEST_F(ArrayTest, MoreTasksThanTheClusterHolds_AreRefused) {
  SubmitArray(Tasks(1, 0, "b"));
  const ReplyAction refused = SubmitArray(Tasks(static_cast<int>(kLiveJobsMax), 0));
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.status.message(), HasSubstr("the array has 10000 tasks"));
}

TEST_F(ArrayTest, MaxRunning_LetsSoManyTasksGoAtATime_InOrder) {
  Hello();
  ASSERT_OK(SubmitArray(Tasks(4, 1)).status);
  EXPECT_EQ(StateOf("a-0"), v1::JOB_STATE_PLACING);
  EXPECT_THAT(Codes(4), ElementsAre(v1::WAIT_CODE_UNSPECIFIED, v1::WAIT_CODE_ARRAY,
                                    v1::WAIT_CODE_ARRAY, v1::WAIT_CODE_ARRAY));
  EXPECT_EQ(core_->GetJob("a-1")->waiting().limit(), 1);
  End("a-0", v1::CAUSE_COMPLETED);
  EXPECT_EQ(StateOf("a-0"), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(StateOf("a-1"), v1::JOB_STATE_PLACING);
  EXPECT_EQ(core_->GetJob("a-2")->waiting().code(), v1::WAIT_CODE_ARRAY);
  Restart();
  Hello(2, Ranks(core_->GetJob("a-1").value(), v1::RANK_STATE_PREPARED));
  EXPECT_EQ(core_->GetJob("a-2")->waiting().code(), v1::WAIT_CODE_ARRAY);
  End("a-1", v1::CAUSE_USER_ERROR);
  EXPECT_EQ(StateOf("a-2"), v1::JOB_STATE_PLACING);
}

TEST_F(ArrayTest, TaskThatIsHeldOrCancelled_MakesRoomForTheNext) {
  ASSERT_OK(SubmitArray(Tasks(4, 1)).status);  // there is no worker
  EXPECT_THAT(Codes(3),
              ElementsAre(v1::WAIT_CODE_NO_WORKERS, v1::WAIT_CODE_ARRAY, v1::WAIT_CODE_ARRAY));
  Handle(ChangeJobEvent{CallId(3), "a-0", ChangeJobEvent::Change::kHold});
  EXPECT_THAT(Codes(3),
              ElementsAre(v1::WAIT_CODE_HELD, v1::WAIT_CODE_NO_WORKERS, v1::WAIT_CODE_ARRAY));
  Handle(ChangeJobEvent{CallId(3), "a-0", ChangeJobEvent::Change::kRelease});
  EXPECT_EQ(core_->GetJob("a-0")->waiting().code(), v1::WAIT_CODE_ARRAY);
  Handle(CancelEvent{CallId(4), "a-1"});
  EXPECT_THAT(Codes(3), ElementsAre(v1::WAIT_CODE_NO_WORKERS, v1::WAIT_CODE_UNSPECIFIED,
                                    v1::WAIT_CODE_ARRAY));
  Handle(CancelEvent{CallId(4), "a-2"});  // it waits for its turn
  EXPECT_EQ(StateOf("a-2"), v1::JOB_STATE_CANCELLED);
  Handle(ChangeJobEvent{CallId(3), "a-3", ChangeJobEvent::Change::kRequeue});
  EXPECT_OK(Actions<ReplyAction>()[0].status);
}

TEST_F(ArrayTest, Change_ActsOnAllTasks_AndCountsWhatItCouldNot) {
  Hello();
  ASSERT_OK(SubmitArray(Tasks(5, 0)).status);  // two of them start
  End("a-0", v1::CAUSE_COMPLETED);
  const ReplyAction held = Change(ChangeJobEvent::Change::kHold);
  ASSERT_OK(held.status);
  EXPECT_EQ(held.array.ended(), 1);
  EXPECT_EQ(held.array.changed(), 2);
  EXPECT_EQ(held.array.refused(), 2);
  EXPECT_THAT(held.array.refusals(0), HasSubstr("`muster suspend"));
  EXPECT_EQ(StateOf("a-4"), v1::JOB_STATE_HELD);
  EXPECT_EQ(Change(ChangeJobEvent::Change::kRelease).array.changed(), 4);
  EXPECT_EQ(StateOf("a-4"), v1::JOB_STATE_QUEUED);
  EXPECT_EQ(Change(std::nullopt).array.changed(), 4);
  EXPECT_EQ(StateOf("a-4"), v1::JOB_STATE_CANCELLED);
  EXPECT_EQ(StateOf("a-1"), v1::JOB_STATE_STOPPING);
  EXPECT_EQ(StateOf("a-0"), v1::JOB_STATE_SUCCEEDED);
  EXPECT_EQ(Change(std::nullopt, "none").status.code(), absl::StatusCode::kNotFound);
}

TEST_F(ArrayTest, Suspended_HoldsTasksThatRunAndThatWait_UntilReleased) {
  Hello();
  ASSERT_OK(SubmitArray(Tasks(5, 2)).status);                              // two of them start
  EXPECT_EQ(Change(ChangeJobEvent::Change::kPreempt).array.changed(), 2);  // others do not run
  EXPECT_EQ(Change(ChangeJobEvent::Change::kSuspend).array.changed(), 5);
  for (const char* running : {"a-0", "a-1"}) {
    Observe(Ranks(*core_->GetJob(running), v1::RANK_STATE_RELEASED));
    EXPECT_EQ(StateOf(running), v1::JOB_STATE_HELD);
  }
  for (const char* waiting : {"a-2", "a-3", "a-4"}) EXPECT_EQ(StateOf(waiting), v1::JOB_STATE_HELD);
  EXPECT_EQ(Change(ChangeJobEvent::Change::kRelease).array.changed(), 5);
  EXPECT_EQ(StateOf("a-0"), v1::JOB_STATE_PLACING);
}

TEST_F(ArrayTest, Explain_HasEachReasonOnce_AndWhatIsNext) {
  Hello();  // two slots
  SubmitArray(Tasks(8, 4));
  Handle(ChangeJobEvent{CallId(3), "a-3", ChangeJobEvent::Change::kHold, "", {}});
  const absl::StatusOr<Explained> explained = core_->Explain("a", now_);
  ASSERT_OK(explained.status());
  ASSERT_TRUE(explained->array.has_value());
  const v1::ArrayOutlook& array = *explained->array;
  EXPECT_EQ(array.array(), "a");
  EXPECT_EQ(array.tasks(), 8);
  EXPECT_EQ(array.running(), 2);
  EXPECT_EQ(array.waiting(), 6);
  std::map<v1::WaitCode, int> counts;
  for (const v1::ArrayWait& wait : array.reasons()) counts[wait.reason().code()] += wait.tasks();
  EXPECT_EQ(counts[v1::WAIT_CODE_ARRAY], 3);
  EXPECT_EQ(counts[v1::WAIT_CODE_HELD], 1);
  EXPECT_EQ(counts[v1::WAIT_CODE_SLOTS_TAKEN], 1);
  EXPECT_EQ(array.reasons(0).first_task(), "a-5");
  EXPECT_EQ(array.next_task(), "a-2");
  EXPECT_EQ(array.next().code(), v1::WAIT_CODE_SLOTS_TAKEN);
  EXPECT_FALSE(core_->Explain("b", now_).ok());
}

TEST_F(ArrayTest, NameOfANewerJob_IsNotTheArrays) {
  SubmitArray(Tasks(1, 0, "job"));
  Change(std::nullopt, "job");
  Submit();
  EXPECT_EQ(Change(std::nullopt, "job").status.code(), absl::StatusCode::kNotFound);
}

class AfterArrayTest : public ArrayTest {
 protected:
  absl::Status SubmitAfter(const std::string& name, const std::string& condition) {
    v1::JobSpec spec = Spec(1);
    spec.set_name(name);
    spec.add_after(absl::StrCat("a:", condition));
    Handle(SubmitEvent{CallId(1), spec, ""});
    return Actions<ReplyAction>()[0].status;
  }
};

TEST_F(AfterArrayTest, SucceededArray_IsAllOfItsTasks) {
  Hello();
  SubmitArray(Tasks(2, 0));
  ASSERT_OK(SubmitAfter("good", "succeeded"));
  ASSERT_OK(SubmitAfter("bad", "failed"));
  EXPECT_EQ(WaitOf("good").code(), v1::WAIT_CODE_AFTER);
  EXPECT_TRUE(WaitOf("good").after(0).array());
  End("a-0", v1::CAUSE_COMPLETED);
  EXPECT_EQ(WaitOf("good").code(), v1::WAIT_CODE_AFTER);
  Restart();
  Hello(2, Ranks(core_->GetJob("a-1").value(), v1::RANK_STATE_PREPARED));
  End("a-1", v1::CAUSE_COMPLETED);
  EXPECT_EQ(StateOf("good"), v1::JOB_STATE_PLACING);
  EXPECT_EQ(StateOf("bad"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(core_->GetJob("bad")->message(), HasSubstr("all tasks have succeeded"));
  EXPECT_OK(SubmitAfter("late", "succeeded"));
  EXPECT_EQ(SubmitAfter("later", "failed").code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(AfterArrayTest, TaskThatFails_FailsWhoWaitsForSuccessAtOnce) {
  Hello();
  SubmitArray(Tasks(3, 1));
  ASSERT_OK(SubmitAfter("good", "succeeded"));
  ASSERT_OK(SubmitAfter("bad", "failed"));
  ASSERT_OK(SubmitAfter("any", "ended"));
  End("a-0", v1::CAUSE_USER_ERROR);
  EXPECT_EQ(StateOf("good"), v1::JOB_STATE_FAILED);
  EXPECT_THAT(core_->GetJob("good")->message(), HasSubstr("a task has failed or was cancelled"));
  EXPECT_EQ(WaitOf("bad").code(), v1::WAIT_CODE_AFTER);
  EXPECT_EQ(SubmitAfter("late", "succeeded").code(), absl::StatusCode::kFailedPrecondition);
  Restart();
  Hello(2, Ranks(core_->GetJob("a-1").value(), v1::RANK_STATE_PREPARED));
  End("a-1", v1::CAUSE_COMPLETED);
  End("a-2", v1::CAUSE_COMPLETED);
  EXPECT_EQ(StateOf("bad"), v1::JOB_STATE_PLACING);
  EXPECT_EQ(StateOf("any"), v1::JOB_STATE_PLACING);
}

TEST_F(AfterArrayTest, CancelledArray_EndsAtOnceForThoseWhoWait) {
  SubmitArray(Tasks(3, 1));
  ASSERT_OK(SubmitAfter("good", "succeeded"));
  ASSERT_OK(SubmitAfter("any", "ended"));
  Change(std::nullopt);
  EXPECT_EQ(StateOf("good"), v1::JOB_STATE_FAILED);
  EXPECT_EQ(WaitOf("any").code(), v1::WAIT_CODE_NO_WORKERS);
}

}  // namespace
}  // namespace muster::coordinator
