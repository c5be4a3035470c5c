// The RPCs about arrays.
#include <string>

#include "absl/strings/str_cat.h"
#include "proto/spec/array.h"
#include "tests/coordinator/rpc_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

v1::SubmitArrayRequest Array(int tasks) {
  v1::SubmitArrayRequest request;
  for (int i = 0; i < tasks; ++i) {
    v1::JobSpec& spec = *request.add_tasks();
    spec = testing::SmallJobSpec(absl::StrCat("sweep-", i));
    (*spec.mutable_labels())[spec::kArrayLabel] = "sweep";
    (*spec.mutable_labels())[spec::kArrayIndexLabel] = absl::StrCat(i);
    v1::ArrayTask& task = *spec.mutable_array_task();
    task.set_array("sweep");
    task.set_index(i);
    task.set_tasks(tasks);
    v1::ArrayValue& value = *task.add_values();
    value.set_key("lr");
    value.set_value(absl::StrCat(i, "e-3"));
  }
  return request;
}

TEST_F(RpcTest, Array_IsSubmittedChangedAndListed) {
  v1::SubmitArrayResponse submitted;
  ASSERT_TRUE(stub_->SubmitArray(Context().get(), Array(3), &submitted).ok());
  EXPECT_EQ(submitted.array().tasks(), 3);
  v1::ChangeArrayRequest change;
  change.set_name("sweep");
  change.set_change(v1::ARRAY_CHANGE_HOLD);
  v1::ChangeArrayResponse changed;
  ASSERT_TRUE(stub_->ChangeArray(Context().get(), change, &changed).ok());
  EXPECT_EQ(changed.array().changed(), 3);
  v1::ListJobsRequest list;
  list.set_label_selector("array=sweep");
  list.set_summary(true);
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), list, &jobs).ok());
  ASSERT_EQ(jobs.jobs_size(), 3);
  EXPECT_EQ(jobs.jobs(0).state(), v1::JOB_STATE_HELD);
  EXPECT_EQ(jobs.jobs(0).spec().array_task().array_id(), submitted.array().array_id());
  EXPECT_EQ(jobs.jobs(0).spec().array_task().values(0).value(), "2e-3");
  v1::ExplainRequest why;
  why.set_name("sweep");
  v1::ExplainResponse explained;
  ASSERT_TRUE(stub_->Explain(Context().get(), why, &explained).ok());
  EXPECT_EQ(explained.array().waiting(), 3);
  why.set_name("sweep-9");
  EXPECT_THAT(stub_->Explain(Context().get(), why, &explained).error_message(),
              HasSubstr("did you mean 'sweep-"));
  v1::ResizeJobRequest resize;
  resize.set_name("sweep");
  resize.set_ranks(2);
  v1::Job job;
  EXPECT_THAT(stub_->ResizeJob(Context().get(), resize, &job).error_message(),
              HasSubstr("'sweep' is an array of jobs; name one of its tasks, such as 'sweep-0'"));
  change.set_name(submitted.array().array_id());
  change.set_change(v1::ARRAY_CHANGE_SUSPEND);
  ASSERT_TRUE(stub_->ChangeArray(Context().get(), change, &changed).ok());
  EXPECT_EQ(changed.array().changed(), 3);
  change.set_change(v1::ARRAY_CHANGE_CANCEL);
  ASSERT_TRUE(stub_->ChangeArray(Context().get(), change, &changed).ok());
  EXPECT_EQ(changed.array().changed(), 3);
}

TEST_F(RpcTest, BadArrayRequest_NamesTheTaskAndTheField) {
  v1::SubmitArrayResponse response;
  v1::SubmitArrayRequest request = Array(2);
  request.mutable_tasks(1)->mutable_engine()->mutable_model()->set_heads(3);
  grpc::Status status = stub_->SubmitArray(Context().get(), request, &response);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("task 1: engine.model.heads: "));
  status = stub_->SubmitArray(Context().get(), {}, &response);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  request = Array(2);
  request.set_validate_only(true);
  ASSERT_TRUE(stub_->SubmitArray(Context().get(), request, &response).ok());
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 0);

  v1::SubmitResponse single;
  status = Submit(request.tasks(0), "", &single);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("array_task: is for the tasks of SubmitArray"));

  v1::ChangeArrayRequest change;
  change.set_name("sweep");
  v1::ChangeArrayResponse changed;
  status = stub_->ChangeArray(Context().get(), change, &changed);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("change: "));
  change.set_change(v1::ARRAY_CHANGE_HOLD);
  status = stub_->ChangeArray(Context().get(), change, &changed);
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
}

}  // namespace
}  // namespace muster::coordinator
