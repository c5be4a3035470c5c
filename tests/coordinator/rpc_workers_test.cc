// The streams of daemons, and what clients read through them: workers and logs.
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/coordinator/rpc_fixture.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST_F(RpcTest, Daemon_IsWelcomedWithClusterAndTerm_AndListed) {
  Daemon daemon(*coordinator_, "w0", 2);
  const auto welcome = daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
  EXPECT_EQ(welcome.cluster_id(), "test-cluster");
  EXPECT_GT(welcome.leader_term(), 0u);
  v1::ListWorkersResponse workers;
  ASSERT_TRUE(stub_->ListWorkers(Context().get(), {}, &workers).ok());
  ASSERT_EQ(workers.workers_size(), 1);
  EXPECT_EQ(workers.workers(0).name(), "w0");
  EXPECT_EQ(workers.workers(0).slots_free(), 2);
  daemon.Cancel();
  daemon.Finish();
}

TEST_F(RpcTest, WorkerPages_GoByName) {
  std::vector<std::unique_ptr<Daemon>> daemons;
  for (const char* name : {"w2", "w0", "w1"}) {
    daemons.push_back(std::make_unique<Daemon>(*coordinator_, name, 1));
    daemons.back()->ReadUntil([](const auto& m) { return m.has_welcome(); });
  }
  v1::ListWorkersRequest request;
  request.set_page_size(1);
  std::vector<std::string> seen;
  do {
    v1::ListWorkersResponse response;
    ASSERT_TRUE(stub_->ListWorkers(Context().get(), request, &response).ok());
    for (const v1::Worker& worker : response.workers()) seen.push_back(worker.name());
    request.set_page_token(response.next_page_token());
  } while (!request.page_token().empty());
  EXPECT_THAT(seen, ElementsAre("w0", "w1", "w2"));
  for (const auto& daemon : daemons) daemon->Cancel();
}

TEST_F(RpcTest, SessionWithoutHelloFirst_IsRefused) {
  const auto stub = v1::WorkerService::NewStub(coordinator_->Channel());
  const auto context = Context();
  const auto stream = stub->Session(context.get());
  v1::FromWorker message;
  message.mutable_observed();
  stream->Write(message);
  EXPECT_EQ(stream->Finish().error_code(), grpc::INVALID_ARGUMENT);
}

TEST_F(RpcTest, MessageOfAnotherIncarnation_EndsTheStreamWithAborted) {
  Daemon daemon(*coordinator_, "w0", 1);
  const auto stub = v1::WorkerService::NewStub(coordinator_->Channel());
  const auto context = Context();
  const auto stream = stub->Session(context.get());
  v1::FromWorker message;
  message.set_incarnation(3);
  message.mutable_hello()->set_worker("w1");
  stream->Write(message);
  message.set_incarnation(2);
  message.mutable_observed();
  stream->Write(message);
  v1::FromCoordinator welcome;
  while (stream->Read(&welcome)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::ABORTED);
  daemon.Cancel();
}

TEST_F(RpcTest, JobThatFits_IsSentToItsDaemons_AndItsLogComesFromThere) {
  Daemon daemon(*coordinator_, "w0", 2);
  daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
  const v1::Job job = MustSubmit("gpt");
  const auto placed =
      daemon.ReadUntil([](const auto& m) { return m.desired().attempts_size() > 0; });
  EXPECT_EQ(placed.desired().attempts(0).job_id(), job.id());
  EXPECT_EQ(placed.desired().attempts(0).ranks_size(), 2);

  v1::GetLogsRequest request;
  request.set_name("gpt");
  request.set_rank(1);
  const auto context = Context();
  const auto logs = stub_->GetLogs(context.get(), request);
  const std::string text[] = {"first line\n", "second line\n"};
  int64_t offset = 0;
  for (const std::string& line : text) {
    const auto asked = daemon.ReadUntil([](const auto& m) { return m.has_log(); });
    EXPECT_EQ(asked.log().job_id(), job.id());
    EXPECT_EQ(asked.log().rank(), 1);
    EXPECT_EQ(asked.log().offset(), offset);
    v1::FromWorker reply;
    reply.mutable_log()->set_request(asked.log().request());
    reply.mutable_log()->set_data(line);
    reply.mutable_log()->set_offset(offset);
    reply.mutable_log()->set_end(&line == &text[1]);
    ASSERT_TRUE(daemon.Write(reply));
    offset += static_cast<int64_t>(line.size());
  }
  std::string read;
  v1::LogChunk chunk;
  while (logs->Read(&chunk)) read += chunk.data();
  EXPECT_TRUE(logs->Finish().ok());
  EXPECT_EQ(read, text[0] + text[1]);

  // Without the daemon the log cannot be read.
  daemon.Cancel();
  daemon.Finish();
  const auto gone_context = Context();
  const grpc::Status gone = stub_->GetLogs(gone_context.get(), request)->Finish();
  EXPECT_EQ(gone.error_code(), grpc::UNAVAILABLE);
}

TEST_F(RpcTest, FollowedLog_GoesOnWhileTheRankWrites_AndEndsWithTheJob) {
  Daemon daemon(*coordinator_, "w0", 2);
  daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
  const v1::Job job = MustSubmit("gpt");
  daemon.ReadUntil([](const auto& m) { return m.desired().attempts_size() > 0; });
  v1::GetLogsRequest request;
  request.set_name("gpt");
  request.set_follow(true);
  request.set_tail_bytes(5);
  const auto context = Context();
  const auto logs = stub_->GetLogs(context.get(), request);
  const auto answer = [&](int64_t asked_from, const std::string& data, int64_t offset,
                          bool closed) {
    const auto asked = daemon.ReadUntil([](const auto& m) { return m.has_log(); });
    EXPECT_EQ(asked.log().offset(), asked_from);
    v1::FromWorker reply;
    reply.mutable_log()->set_request(asked.log().request());
    reply.mutable_log()->set_data(data);
    reply.mutable_log()->set_offset(offset);
    reply.mutable_log()->set_end(true);
    reply.mutable_log()->set_closed(closed);
    ASSERT_TRUE(daemon.Write(reply));
  };
  answer(-5, "tail\n", 100, false);
  answer(105, "", 105, false);  // nothing new yet
  answer(105, "last\n", 105, true);

  v1::CancelJobRequest cancel;
  cancel.set_name("gpt");
  v1::Job cancelled;
  ASSERT_TRUE(stub_->CancelJob(Context().get(), cancel, &cancelled).ok());
  const auto stopped = daemon.ReadUntil([](const auto& m) {
    return m.desired().attempts_size() > 0 &&
           m.desired().attempts(0).phase() == v1::DESIRED_PHASE_STOPPED;
  });
  v1::FromWorker released;
  v1::Observed& observed = *released.mutable_observed();
  observed.set_applied_revision(stopped.desired().revision());
  v1::ObservedAttempt& attempt = *observed.add_attempts();
  attempt.set_job_id(job.id());
  attempt.set_epoch(stopped.desired().attempts(0).epoch());
  for (int rank = 0; rank < 2; ++rank) {
    v1::ObservedRank& held = *attempt.add_ranks();
    held.set_rank(rank);
    held.set_state(v1::RANK_STATE_RELEASED);
    held.mutable_exit()->set_cause(v1::CAUSE_CANCELLED);
  }
  ASSERT_TRUE(daemon.Write(released));
  std::string read;
  v1::LogChunk chunk;
  while (logs->Read(&chunk)) read += chunk.data();
  EXPECT_TRUE(logs->Finish().ok());
  EXPECT_EQ(read, "tail\nlast\n");
  daemon.Cancel();
}

TEST_F(RpcTest, LogsOfARankThatIsNotThere_SayWhatIsPossible) {
  MustSubmit("gpt");
  v1::GetLogsRequest request;
  request.set_name("gpt");
  request.set_rank(2);
  const auto context = Context();
  const grpc::Status rank = stub_->GetLogs(context.get(), request)->Finish();
  EXPECT_EQ(rank.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_THAT(rank.error_message(), HasSubstr("0 to 1"));
  request.set_rank(0);
  const auto early_context = Context();
  EXPECT_EQ(stub_->GetLogs(early_context.get(), request)->Finish().error_code(),
            grpc::FAILED_PRECONDITION);
}

// A daemon whose only job trains on its two slots.
class TrainingRpcTest : public RpcTest {
 protected:
  void SetUp() override {
    daemon_.ReadUntil([](const auto& m) { return m.has_welcome(); });
    job_ = MustSubmit("gpt");
    const auto desired =
        daemon_.ReadUntil([](const auto& m) { return m.desired().attempts_size() > 0; });
    Report(desired.desired(), v1::RANK_STATE_PREPARED);
    const auto start = daemon_.ReadUntil([](const auto& m) {
      return m.desired().attempts_size() > 0 &&
             m.desired().attempts(0).phase() == v1::DESIRED_PHASE_RUNNING;
    });
    Report(start.desired(), v1::RANK_STATE_TRAINING);
    v1::GetJobRequest request;
    request.set_name("gpt");
    const auto context = Context();
    const auto watch = stub_->WatchJob(context.get(), request);
    while (watch->Read(&job_) && job_.state() != v1::JOB_STATE_RUNNING) {
    }
    ASSERT_EQ(job_.state(), v1::JOB_STATE_RUNNING);
    context->TryCancel();
  }
  void TearDown() override { daemon_.Cancel(); }

  void Report(const v1::Desired& desired, v1::RankState state) {
    v1::FromWorker message;
    v1::Observed& observed = *message.mutable_observed();
    observed.set_applied_revision(desired.revision());
    v1::ObservedAttempt& attempt = *observed.add_attempts();
    attempt.set_job_id(desired.attempts(0).job_id());
    attempt.set_epoch(desired.attempts(0).epoch());
    for (int rank = 0; rank < 2; ++rank) {
      v1::ObservedRank& held = *attempt.add_ranks();
      held.set_rank(rank);
      held.set_state(state);
      if (state != v1::RANK_STATE_TRAINING) continue;
      held.mutable_progress()->set_step(1);
    }
    ASSERT_TRUE(daemon_.Write(message));
  }

  Daemon daemon_{*coordinator_, "w0", 2};
  v1::Job job_;
};

TEST_F(TrainingRpcTest, CollectivesOfARank_ComeOnceItHasLeftARecord) {
  v1::GetCollectivesRequest request;
  request.set_name("gpt");
  request.set_rank(1);
  v1::GetCollectivesResponse response;
  grpc::Status status;
  std::thread call([&] { status = stub_->GetCollectives(Context().get(), request, &response); });
  uint64_t number = 0;
  for (int asked = 0; asked < 2; ++asked) {
    const auto ask = daemon_.ReadUntil([](const auto& m) { return m.has_collectives(); });
    EXPECT_EQ(ask.collectives().job_id(), job_.id());
    EXPECT_EQ(ask.collectives().rank(), 1);
    EXPECT_NE(ask.collectives().number(), 0u);
    if (number != 0) {
      EXPECT_EQ(ask.collectives().number(), number);
    }
    number = ask.collectives().number();
    v1::FromWorker reply;
    // A reply of another kind with the same number answers nothing.
    reply.mutable_profile()->set_request(ask.collectives().request());
    ASSERT_TRUE(daemon_.Write(reply));
    reply.mutable_collectives()->set_request(ask.collectives().request());
    if (asked == 1) {
      reply.mutable_collectives()->mutable_record()->add_collectives()->set_operation("all-reduce");
    }
    ASSERT_TRUE(daemon_.Write(reply));
  }
  call.join();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.epoch(), job_.epoch());
  ASSERT_EQ(response.record().collectives_size(), 1);
  EXPECT_EQ(response.record().collectives(0).operation(), "all-reduce");
}

TEST_F(TrainingRpcTest, CollectivesThatCannotBeHad_SayWhy) {
  v1::GetCollectivesRequest request;
  request.set_name("gpt");
  request.set_rank(2);
  v1::GetCollectivesResponse response;
  EXPECT_EQ(stub_->GetCollectives(Context().get(), request, &response).error_code(),
            grpc::INVALID_ARGUMENT);
  request.set_rank(0);
  grpc::Status status;
  std::thread call([&] { status = stub_->GetCollectives(Context().get(), request, &response); });
  const auto ask = daemon_.ReadUntil([](const auto& m) { return m.has_collectives(); });
  v1::FromWorker reply;
  reply.mutable_collectives()->set_request(ask.collectives().request());
  reply.mutable_collectives()->set_status_code(static_cast<int>(absl::StatusCode::kDataLoss));
  reply.mutable_collectives()->set_status_message("is no record");
  ASSERT_TRUE(daemon_.Write(reply));
  call.join();
  EXPECT_EQ(status.error_code(), grpc::DATA_LOSS);
  EXPECT_EQ(status.error_message(), "is no record");
}

TEST_F(TrainingRpcTest, ProfileOfARank_ComesInChunksOnceItIsRecorded) {
  v1::GetProfileRequest request;
  request.set_name("gpt");
  request.mutable_steps()->set_first_step(2);
  request.mutable_steps()->set_steps(1);
  request.set_wait(true);
  const auto context = Context();
  const auto stream = stub_->GetProfile(context.get(), request);
  const std::string trace = "[{},{}]";
  for (int asked = 0; asked < 3; ++asked) {
    const auto ask = daemon_.ReadUntil([](const auto& m) { return m.has_profile(); });
    EXPECT_EQ(ask.profile().steps().first_step(), 2);
    v1::FromWorker reply;
    v1::ProfileReply& profile = *reply.mutable_profile();
    profile.set_request(ask.profile().request());
    if (asked > 0) {
      EXPECT_EQ(ask.profile().offset(), asked == 1 ? 0 : 4);
      profile.set_recorded(true);
      profile.set_offset(ask.profile().offset());
      profile.set_data(asked == 1 ? trace.substr(0, 4) : trace.substr(4));
      profile.set_end(asked == 2);
    }
    ASSERT_TRUE(daemon_.Write(reply));
  }
  std::string read;
  v1::ProfileChunk chunk;
  while (stream->Read(&chunk)) read += chunk.data();
  EXPECT_TRUE(stream->Finish().ok());
  EXPECT_EQ(read, trace);
}

TEST_F(RpcTest, ProfileOfStepsThatNeverCome_IsRefused) {
  const v1::Job job = MustSubmit("gpt");
  const auto refusal = [&](int64_t first_step, int32_t steps) {
    v1::GetProfileRequest request;
    request.set_name("gpt");
    request.mutable_steps()->set_first_step(first_step);
    request.mutable_steps()->set_steps(steps);
    const auto context = Context();
    const grpc::Status status = stub_->GetProfile(context.get(), request)->Finish();
    return std::make_pair(status.error_code(), status.error_message());
  };
  const auto is = [](grpc::StatusCode code, const std::string& text) {
    return ::testing::Pair(code, HasSubstr(text));
  };
  EXPECT_THAT(refusal(1, 0), is(grpc::INVALID_ARGUMENT, "steps.steps: 0"));
  EXPECT_THAT(refusal(1, 1001), is(grpc::INVALID_ARGUMENT, "1 to 1000"));
  EXPECT_THAT(refusal(0, 1), is(grpc::INVALID_ARGUMENT, "steps.first_step"));
  const std::string end = absl::StrCat("ends at step ", job.spec().engine().training().steps());
  EXPECT_THAT(refusal(job.spec().engine().training().steps(), 2),
              is(grpc::FAILED_PRECONDITION, end));
  EXPECT_THAT(refusal(std::numeric_limits<int64_t>::max(), 5), is(grpc::FAILED_PRECONDITION, end));
  EXPECT_THAT(refusal(1, 1), is(grpc::FAILED_PRECONDITION, "only one that trains"));
}

}  // namespace
}  // namespace muster::coordinator
