// The RPCs about jobs and events.
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/coordinator/rpc_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SmallJobSpec;

TEST_F(RpcTest, SubmittedJob_CanBeReadByNameAndId_WithDefaultsFilledIn) {
  const v1::Job submitted = MustSubmit("gpt");
  EXPECT_EQ(submitted.spec().queue(), "default");
  for (const std::string& key : {submitted.name(), submitted.id()}) {
    v1::GetJobRequest request;
    request.set_name(key);
    v1::Job job;
    ASSERT_TRUE(stub_->GetJob(Context().get(), request, &job).ok());
    EXPECT_EQ(job.id(), submitted.id());
    EXPECT_EQ(job.state(), v1::JOB_STATE_QUEUED);
  }
}

TEST_F(RpcTest, RequestId_MakesOneJob_AlsoAcrossARestart) {
  v1::SubmitResponse first, again, restarted;
  ASSERT_TRUE(Submit(SmallJobSpec("gpt"), "request-1", &first).ok());
  EXPECT_FALSE(first.existed());
  ASSERT_TRUE(Submit(SmallJobSpec("gpt"), "request-1", &again).ok());
  EXPECT_TRUE(again.existed());
  const int port = coordinator_->port();
  coordinator_->Restart();
  EXPECT_EQ(coordinator_->port(), port);
  ASSERT_TRUE(Submit(SmallJobSpec("gpt"), "request-1", &restarted).ok());
  EXPECT_TRUE(restarted.existed());
  EXPECT_EQ(again.job().id(), first.job().id());
  EXPECT_EQ(restarted.job().id(), first.job().id());
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 1);
}

TEST_F(RpcTest, JobsOfOneCall_AreAcceptedOrRefusedEach_InTheirOrder) {
  v1::SubmitJobsRequest request;
  for (const char* name : {"first", "second", "first", "bad", "third"}) {
    v1::SubmitRequest& job = *request.add_jobs();
    *job.mutable_spec() = SmallJobSpec(name);
    job.set_request_id(absl::StrCat("r", request.jobs_size()));
  }
  request.mutable_jobs(1)->mutable_spec()->add_after("first:succeeded");
  request.mutable_jobs(3)->mutable_spec()->mutable_engine()->mutable_model()->set_heads(3);
  v1::SubmitJobsResponse response;
  ASSERT_TRUE(stub_->SubmitJobs(Context().get(), request, &response).ok());
  ASSERT_EQ(response.results_size(), 5);
  for (const int accepted : {0, 1, 4}) {
    EXPECT_EQ(response.results(accepted).code(), 0) << response.results(accepted).message();
    EXPECT_EQ(response.results(accepted).accepted().job().name(),
              request.jobs(accepted).spec().name());
  }
  EXPECT_EQ(response.results(2).code(), grpc::ALREADY_EXISTS);
  EXPECT_EQ(response.results(3).code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(response.results(3).message(), HasSubstr("engine.model.heads"));
  v1::SubmitJobsResponse again;
  ASSERT_TRUE(stub_->SubmitJobs(Context().get(), request, &again).ok());
  EXPECT_TRUE(again.results(4).accepted().existed());
  EXPECT_EQ(again.results(4).accepted().job().id(), response.results(4).accepted().job().id());
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), {}, &jobs).ok());
  ASSERT_EQ(jobs.jobs_size(), 3);  // newest first
  EXPECT_EQ(jobs.jobs(0).name(), "third");
  EXPECT_EQ(jobs.jobs(2).name(), "first");
}

TEST_F(RpcTest, JobsOfOneCall_NoneOrTooManyOrToBeCheckedAlone_AreInvalid) {
  v1::SubmitJobsRequest request;
  v1::SubmitJobsResponse response;
  EXPECT_THAT(stub_->SubmitJobs(Context().get(), request, &response).error_message(),
              HasSubstr("jobs: 0, 1 to 1000 are possible"));
  for (int i = 0; i < 1001; ++i) request.add_jobs();
  EXPECT_EQ(stub_->SubmitJobs(Context().get(), request, &response).error_code(),
            grpc::INVALID_ARGUMENT);
  request.clear_jobs();
  *request.add_jobs()->mutable_spec() = SmallJobSpec("a");
  request.mutable_jobs(0)->set_validate_only(true);
  EXPECT_THAT(stub_->SubmitJobs(Context().get(), request, &response).error_message(),
              HasSubstr("jobs[0].validate_only: "));
}

TEST_F(RpcTest, WrongSpec_IsRefusedByField_AndMakesNoJob) {
  v1::JobSpec spec = SmallJobSpec("gpt");
  spec.mutable_engine()->mutable_model()->set_heads(3);
  v1::SubmitResponse response;
  const grpc::Status status = Submit(spec, "", &response);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("engine.model.heads"));
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 0);
}

TEST_F(RpcTest, NameOfTenMegabytes_IsInvalidArgumentEverywhere) {
  const std::string huge(10 << 20, 'a');
  v1::SubmitResponse response;
  const grpc::Status submitted = Submit(SmallJobSpec(huge), "", &response);
  EXPECT_EQ(submitted.error_code(), grpc::INVALID_ARGUMENT) << submitted.error_message();
  EXPECT_THAT(submitted.error_message(), HasSubstr("name"));

  v1::GetJobRequest get;
  get.set_name(huge);
  v1::Job job;
  EXPECT_EQ(stub_->GetJob(Context().get(), get, &job).error_code(), grpc::INVALID_ARGUMENT);
  v1::CancelJobRequest cancel;
  cancel.set_name(huge);
  EXPECT_EQ(stub_->CancelJob(Context().get(), cancel, &job).error_code(), grpc::INVALID_ARGUMENT);
  const auto watch_context = Context();
  EXPECT_EQ(stub_->WatchJob(watch_context.get(), get)->Finish().error_code(),
            grpc::INVALID_ARGUMENT);
  EXPECT_EQ(Submit(SmallJobSpec("a"), huge, &response).error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(RpcTest, ValidateOnly_FillsInDefaultsAndSubmitsNothing) {
  v1::SubmitRequest request;
  *request.mutable_spec() = SmallJobSpec("gpt");
  request.set_validate_only(true);
  v1::SubmitResponse response;
  ASSERT_TRUE(stub_->Submit(Context().get(), request, &response).ok());
  EXPECT_EQ(response.job().spec().queue(), "default");
  EXPECT_EQ(response.job().id(), "");
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 0);
  request.mutable_spec()->set_queue("nope");
  EXPECT_THAT(stub_->Submit(Context().get(), request, &response).error_message(),
              HasSubstr("there is no queue 'nope'"));
  request.mutable_spec()->set_queue("default");
  request.mutable_spec()->add_after("none:succeeded");
  EXPECT_THAT(stub_->Submit(Context().get(), request, &response).error_message(),
              HasSubstr("after[0]: no job has the name or id 'none'"));
}

TEST_F(RpcTest, UnknownJob_IsNotFoundWithTheNearestName) {
  MustSubmit("gpt-large");
  v1::GetJobRequest request;
  request.set_name("gpt-lagre");
  v1::Job job;
  const grpc::Status status = stub_->GetJob(Context().get(), request, &job);
  EXPECT_EQ(status.error_code(), grpc::NOT_FOUND);
  EXPECT_THAT(status.error_message(), HasSubstr("gpt-large"));
}

TEST_F(RpcTest, JobPages_StayStableWhileJobsComeAndAcrossARestart) {
  for (int i = 0; i < 5; ++i) MustSubmit(absl::StrCat("job-", i));
  v1::ListJobsRequest request;
  request.set_page_size(2);
  std::vector<std::string> seen;
  for (int page = 0; page < 4; ++page) {
    v1::ListJobsResponse response;
    ASSERT_TRUE(stub_->ListJobs(Context().get(), request, &response).ok());
    for (const v1::Job& job : response.jobs()) seen.push_back(job.name());
    request.set_page_token(response.next_page_token());
    if (response.next_page_token().empty()) break;
    if (page == 0) MustSubmit("newer");
    if (page == 1) coordinator_->Restart();
  }
  EXPECT_THAT(seen, ElementsAre("job-4", "job-3", "job-2", "job-1", "job-0"));

  request.set_page_token("e12");
  v1::ListJobsResponse response;
  EXPECT_EQ(stub_->ListJobs(Context().get(), request, &response).error_code(),
            grpc::INVALID_ARGUMENT);
  request.set_page_token("");
  request.set_page_size(1001);
  EXPECT_EQ(stub_->ListJobs(Context().get(), request, &response).error_code(),
            grpc::INVALID_ARGUMENT);
}

TEST_F(RpcTest, CancelledJob_EndsItsWatch) {
  MustSubmit("gpt");
  v1::GetJobRequest request;
  request.set_name("gpt");
  const auto context = Context();
  const auto watch = stub_->WatchJob(context.get(), request);
  v1::Job job;
  ASSERT_TRUE(watch->Read(&job));
  EXPECT_EQ(job.state(), v1::JOB_STATE_QUEUED);
  v1::CancelJobRequest cancel;
  cancel.set_name("gpt");
  ASSERT_TRUE(stub_->CancelJob(Context().get(), cancel, &job).ok());
  v1::Job last;
  while (watch->Read(&job)) last = job;
  EXPECT_EQ(last.state(), v1::JOB_STATE_CANCELLED);
  EXPECT_TRUE(watch->Finish().ok());
}

// ---- events -------------------------------------------------------------------------------------

TEST_F(RpcTest, EventWatch_ResumedAcrossARestart_LosesAndRepeatsNothing) {
  std::vector<uint64_t> seen;
  uint64_t last_wanted = 0;
  v1::WatchEventsRequest request;
  for (int round = 0; round < 3; ++round) {
    MustSubmit(absl::StrCat("job-", round));
    v1::ListEventsResponse events;
    ASSERT_TRUE(stub_->ListEvents(Context().get(), {}, &events).ok());
    last_wanted = events.events(events.events_size() - 1).sequence();
    if (!seen.empty()) request.set_after_sequence(seen.back());
    const auto context = Context();
    const auto watch = stub_->WatchEvents(context.get(), request);
    v1::Event event;
    while ((seen.empty() || seen.back() < last_wanted) && watch->Read(&event)) {
      seen.push_back(event.sequence());
    }
    coordinator_->Restart();
    while (watch->Read(&event)) seen.push_back(event.sequence());
    EXPECT_EQ(watch->Finish().error_code(), grpc::UNAVAILABLE);
  }
  ASSERT_GE(seen.size(), last_wanted);
  for (size_t i = 0; i < seen.size(); ++i) EXPECT_EQ(seen[i], i + 1);
}

TEST_F(RpcTest, EventWatch_OfOneJob_ShowsItsEventsLive) {
  MustSubmit("other");
  MustSubmit("mine");
  v1::WatchEventsRequest request;
  request.set_job("mine");
  const auto context = Context();
  const auto watch = stub_->WatchEvents(context.get(), request);
  v1::Event event;
  ASSERT_TRUE(watch->Read(&event));
  EXPECT_EQ(event.job_name(), "mine");
  v1::CancelJobRequest cancel;
  v1::Job job;
  cancel.set_name("other");
  ASSERT_TRUE(stub_->CancelJob(Context().get(), cancel, &job).ok());
  cancel.set_name("mine");
  ASSERT_TRUE(stub_->CancelJob(Context().get(), cancel, &job).ok());
  do {
    ASSERT_TRUE(watch->Read(&event));
    EXPECT_EQ(event.job_name(), "mine");
  } while (event.to() != "cancelled");
  context->TryCancel();
  EXPECT_EQ(watch->Finish().error_code(), grpc::CANCELLED);
}

TEST_F(RpcTest, EventWatch_BeyondTheNewestEvent_IsOutOfRange) {
  v1::WatchEventsRequest request;
  request.set_after_sequence(1'000'000);
  const auto context = Context();
  EXPECT_EQ(stub_->WatchEvents(context.get(), request)->Finish().error_code(), grpc::OUT_OF_RANGE);
}

TEST_F(RpcTest, EventPages_CoverTheLogOnce) {
  for (int i = 0; i < 4; ++i) MustSubmit(absl::StrCat("job-", i));
  v1::ListEventsRequest request;
  request.set_page_size(3);
  uint64_t next = 1;
  do {
    v1::ListEventsResponse response;
    ASSERT_TRUE(stub_->ListEvents(Context().get(), request, &response).ok());
    for (const v1::Event& event : response.events()) EXPECT_EQ(event.sequence(), next++);
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_GT(next, 5u);
}

TEST_F(RpcTest, Explain_AnswersForANameOrASpecAndChangesNothing) {
  MustSubmit("first");
  v1::ExplainRequest request;
  v1::ExplainResponse response;
  const auto explain = [&] { return stub_->Explain(Context().get(), request, &response); };
  EXPECT_EQ(explain().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  request.set_name("frist");
  EXPECT_EQ(explain().error_code(), grpc::StatusCode::NOT_FOUND);
  request.set_name("first");
  ASSERT_TRUE(explain().ok());
  EXPECT_EQ(response.job().name(), "first");
  EXPECT_EQ(response.waiting().code(), v1::WAIT_CODE_NO_WORKERS);
  *request.mutable_spec() = testing::SmallJobSpec("second");
  ASSERT_TRUE(explain().ok());
  EXPECT_EQ(response.job().name(), "second");
  EXPECT_TRUE(response.has_waiting());
  request.mutable_spec()->mutable_resources()->set_ranks(-1);
  EXPECT_EQ(explain().error_code(), grpc::StatusCode::INVALID_ARGUMENT);
  v1::ListJobsResponse jobs;
  ASSERT_TRUE(stub_->ListJobs(Context().get(), {}, &jobs).ok());
  EXPECT_EQ(jobs.jobs_size(), 1);
}

}  // namespace
}  // namespace muster::coordinator
