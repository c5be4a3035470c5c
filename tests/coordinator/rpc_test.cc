// The coordinator as its callers see it: real gRPC on loopback, the real core, a store on disk that
// outlives restarts.
#include <arpa/inet.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/rng.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "coordinator/rpc/server.h"
#include "coordinator/shell.h"
#include "coordinator/store/store.h"
#include "muster/v1/job_service.grpc.pb.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "tests/support/job_spec.h"
#include "tests/support/proxy.h"
#include "tests/support/seed.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::SmallJobSpec;

// For calls that do not end by themselves; no test needs it.
constexpr absl::Duration kGrace = absl::Seconds(60);

// One process's worth of coordinator on a data directory that it can be restarted on.
class Coordinator {
 public:
  explicit Coordinator(std::string directory, absl::Duration keepalive = absl::Seconds(5))
      : directory_(std::move(directory)), keepalive_(keepalive) {
    Start();
  }
  ~Coordinator() { Stop(); }

  void Start() {
    auto opened = OpenRocksDbStore(directory_ + "/store", "", "test-cluster");
    CHECK_OK(opened);
    store_ = *std::move(opened);
    auto shell = Shell::Start(
        {*store_, clock_, *log_, metrics_},
        [this](absl::Time now, CoreOutput* output) {
          return Core::Recover(CoreConfig(), *store_, Rng(testing::TestSeed()), now, output);
        },
        nullptr);
    CHECK_OK(shell);
    shell_ = *std::move(shell);
    auto server = RpcServer::Start(*shell_, {.listen = "127.0.0.1:0",
                                             .version = "1.2.3",
                                             .earlier_port = port_,
                                             .keepalive = keepalive_});
    CHECK_OK(server);
    server_ = *std::move(server);
    CHECK(absl::SimpleAtoi(address().substr(address().rfind(':') + 1), &port_));
  }
  void Stop() {
    if (server_ == nullptr) return;
    server_->Stop(kGrace);
    server_.reset();
    shell_.reset();
    store_.reset();
  }
  void Restart() {
    Stop();
    Start();
  }

  const std::string& address() const { return server_->address(); }
  int port() const { return port_; }
  RpcServer& server() { return *server_; }
  std::shared_ptr<grpc::Channel> Channel() const { return ChannelTo(address()); }
  static std::shared_ptr<grpc::Channel> ChannelTo(const std::string& address) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  }

 private:
  const std::string directory_;
  const absl::Duration keepalive_;
  int port_ = 0;
  RealClock clock_;
  std::shared_ptr<Logger> log_ = Logger::Discard();
  std::unique_ptr<metrics::Registry> registry_ = metrics::DiscardRegistry();
  Metrics metrics_{*registry_};
  std::unique_ptr<Store> store_;
  std::unique_ptr<Shell> shell_;
  std::unique_ptr<RpcServer> server_;
};

class RpcTest : public ::testing::Test {
 protected:
  RpcTest() {
    std::string name = (std::filesystem::temp_directory_path() / "muster-rpc-XXXXXX").string();
    directory_ = mkdtemp(name.data());
    coordinator_ = std::make_unique<Coordinator>(directory_);
    stub_ = v1::JobService::NewStub(coordinator_->Channel());
  }
  ~RpcTest() override {
    coordinator_.reset();
    std::filesystem::remove_all(directory_);
  }

  // A call that a broken coordinator cannot make hang for ever.
  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    context->set_wait_for_ready(true);
    return context;
  }
  grpc::Status Submit(const v1::JobSpec& spec, const std::string& request_id,
                      v1::SubmitResponse* response) {
    v1::SubmitRequest request;
    *request.mutable_spec() = spec;
    request.set_request_id(request_id);
    return stub_->Submit(Context().get(), request, response);
  }
  v1::Job MustSubmit(const std::string& name) {
    v1::SubmitResponse response;
    const grpc::Status status = Submit(SmallJobSpec(name), "", &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.job();
  }

  std::string directory_;
  std::unique_ptr<Coordinator> coordinator_;
  std::unique_ptr<v1::JobService::Stub> stub_;
};

// A daemon reduced to its stream.
class Daemon {
 public:
  Daemon(const Coordinator& coordinator, const std::string& name, int slots)
      : Daemon(coordinator.Channel(), name, slots) {}
  Daemon(std::shared_ptr<grpc::Channel> channel, const std::string& name, int slots)
      : stub_(v1::WorkerService::NewStub(std::move(channel))), stream_(stub_->Session(&context_)) {
    v1::FromWorker message;
    message.set_incarnation(kIncarnation);
    v1::Hello& hello = *message.mutable_hello();
    hello.set_worker(name);
    hello.set_host("localhost");
    for (int i = 0; i < slots; ++i) {
      v1::Device& device = *hello.add_devices();
      device.set_name(absl::StrCat("cpu:", i));
      device.set_kind(v1::DEVICE_KIND_CPU);
    }
    hello.mutable_observed();
    EXPECT_TRUE(stream_->Write(message));
  }

  static constexpr uint64_t kIncarnation = 11;

  bool Write(v1::FromWorker message) {
    message.set_incarnation(kIncarnation);
    return stream_->Write(message);
  }
  bool Read(v1::FromCoordinator* message) { return stream_->Read(message); }
  // The next message of this kind; others are passed over.
  template <typename Has>
  v1::FromCoordinator ReadUntil(Has has) {
    v1::FromCoordinator message;
    while (Read(&message)) {
      if (has(message)) return message;
    }
    ADD_FAILURE() << "the stream ended: " << stream_->Finish().error_message();
    return message;
  }
  grpc::Status Finish() { return stream_->Finish(); }
  void HalfClose() { stream_->WritesDone(); }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  const std::unique_ptr<v1::WorkerService::Stub> stub_;
  const std::unique_ptr<grpc::ClientReaderWriter<v1::FromWorker, v1::FromCoordinator>> stream_;
};

// ---- jobs ---------------------------------------------------------------------------------------

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

// ---- daemons ------------------------------------------------------------------------------------

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
  for (const std::string& piece : text) {
    const auto asked = daemon.ReadUntil([](const auto& m) { return m.has_log(); });
    EXPECT_EQ(asked.log().job_id(), job.id());
    EXPECT_EQ(asked.log().rank(), 1);
    EXPECT_EQ(asked.log().offset(), offset);
    v1::FromWorker reply;
    reply.mutable_log()->set_request(asked.log().request());
    reply.mutable_log()->set_data(piece);
    reply.mutable_log()->set_offset(offset);
    reply.mutable_log()->set_end(&piece == &text[1]);
    ASSERT_TRUE(daemon.Write(reply));
    offset += static_cast<int64_t>(piece.size());
  }
  std::string read;
  v1::LogChunk chunk;
  while (logs->Read(&chunk)) read += chunk.data();
  EXPECT_TRUE(logs->Finish().ok());
  EXPECT_EQ(read, text[0] + text[1]);

  // The daemon goes: the log is out of reach and says so.
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

TEST_F(RpcTest, ProfileOfStepsThatNeverCome_IsRefused) {
  const v1::Job job = MustSubmit("gpt");
  const auto refusal = [&](int64_t first_step, int32_t steps) {
    v1::GetLogsRequest request;
    request.set_name("gpt");
    request.mutable_profile()->set_first_step(first_step);
    request.mutable_profile()->set_steps(steps);
    const auto context = Context();
    const grpc::Status status = stub_->GetLogs(context.get(), request)->Finish();
    return std::make_pair(status.error_code(), status.error_message());
  };
  const auto is = [](grpc::StatusCode code, const std::string& text) {
    return ::testing::Pair(code, HasSubstr(text));
  };
  EXPECT_THAT(refusal(1, 0), is(grpc::INVALID_ARGUMENT, "profile.steps: 0"));
  EXPECT_THAT(refusal(1, 1001), is(grpc::INVALID_ARGUMENT, "1 to 1000"));
  EXPECT_THAT(refusal(0, 1), is(grpc::INVALID_ARGUMENT, "profile.first_step"));
  const std::string end = absl::StrCat("ends at step ", job.spec().engine().training().steps());
  EXPECT_THAT(refusal(job.spec().engine().training().steps(), 2),
              is(grpc::FAILED_PRECONDITION, end));
  EXPECT_THAT(refusal(std::numeric_limits<int64_t>::max(), 5), is(grpc::FAILED_PRECONDITION, end));
  EXPECT_THAT(refusal(1, 1), is(grpc::FAILED_PRECONDITION, "only one that trains"));
}

// ---- the server ---------------------------------------------------------------------------------

// Calls a method by name with the wire bytes of one request, as a client with other ideas of the
// protocol would, and as tests of services whose generated code Debian does not ship must.
grpc::Status CallRaw(const Coordinator& coordinator, const std::string& method,
                     const std::string& request, std::string* reply) {
  grpc::GenericStub stub(coordinator.Channel());
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  const grpc::Slice slice(request);
  const grpc::ByteBuffer sent(&slice, 1);
  grpc::ByteBuffer received;
  grpc::Status result;
  Notification done;
  stub.UnaryCall(&context, method, grpc::StubOptions(), &sent, &received,
                 [&](const grpc::Status& status) {
                   result = status;
                   done.Notify();
                 });
  done.WaitForNotification();
  std::vector<grpc::Slice> slices;
  if (result.ok() && received.Dump(&slices).ok()) {
    for (const grpc::Slice& part : slices) {
      reply->append(reinterpret_cast<const char*>(part.begin()), part.size());
    }
  }
  return result;
}

TEST_F(RpcTest, HealthCheck_Serves) {
  std::string reply;
  ASSERT_TRUE(CallRaw(*coordinator_, "/grpc.health.v1.Health/Check", "", &reply).ok());
  EXPECT_EQ(reply, "\x08\x01");  // HealthCheckResponse{status: SERVING}
}

TEST_F(RpcTest, Reflection_ListsTheServices) {
  std::string services;
  const std::string list_services("\x3a\x00", 2);  // ServerReflectionRequest{list_services: ""}
  ASSERT_TRUE(CallRaw(*coordinator_,
                      "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
                      list_services, &services)
                  .ok());
  EXPECT_THAT(services, HasSubstr("muster.v1.JobService"));
  EXPECT_THAT(services, HasSubstr("muster.v1.WorkerService"));
  EXPECT_THAT(services, HasSubstr("grpc.health.v1.Health"));
}

TEST_F(RpcTest, Version_NamesBuildAndCluster) {
  v1::GetVersionResponse version;
  ASSERT_TRUE(stub_->GetVersion(Context().get(), {}, &version).ok());
  EXPECT_EQ(version.version(), "1.2.3");
  EXPECT_EQ(version.cluster_id(), "test-cluster");
}

void SendBytes(int port, const std::string& bytes) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  ASSERT_EQ(connect(socket, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  // The server may hang up in the middle; that is its right.
  send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  shutdown(socket, SHUT_WR);
  char buffer[4096];
  while (recv(socket, buffer, sizeof(buffer), 0) > 0) {
  }
  close(socket);
}

TEST_F(RpcTest, GarbageOnThePort_KillsNothing) {
  const v1::Job job = MustSubmit("gpt");
  Rng rng(testing::TestSeed());
  const std::string preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
  SendBytes(coordinator_->port(), "GET / HTTP/1.1\r\nHost: x\r\n\r\n");
  SendBytes(coordinator_->port(), "\x16\x03\x01\x02");  // the start of TLS
  for (int i = 0; i < 40; ++i) {
    std::string bytes(1 + rng.Below(4096), '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng.Next());
    SendBytes(coordinator_->port(), (i % 2 == 0 ? preface : "") + bytes);
  }
  v1::GetJobRequest request;
  request.set_name("gpt");
  v1::Job found;
  ASSERT_TRUE(stub_->GetJob(Context().get(), request, &found).ok());
  EXPECT_EQ(found.id(), job.id());
}

TEST_F(RpcTest, MessageThatIsNoProto_FailsItsCallOnly) {
  Rng rng(testing::TestSeed() + 1);
  for (const char* method : {"/muster.v1.JobService/Submit", "/muster.v1.WorkerService/Session",
                             "/muster.v1.JobService/WatchEvents", "/muster.v1.JobService/None"}) {
    std::string bytes(100, '\0');
    for (char& byte : bytes) byte = static_cast<char>(rng.Next() | 0x80);
    std::string reply;
    const grpc::Status status = CallRaw(*coordinator_, method, bytes, &reply);
    EXPECT_FALSE(status.ok()) << method;
    EXPECT_NE(status.error_code(), grpc::DEADLINE_EXCEEDED) << method;
  }
  MustSubmit("gpt");
}

TEST_F(RpcTest, SecondServerOnAPortInUse_IsRefused) {
  auto store = MemoryStore::Make("other");
  RealClock clock;
  const auto log = Logger::Discard();
  const auto registry = metrics::DiscardRegistry();
  Metrics metrics(*registry);
  ASSERT_OK_AND_ASSIGN(const auto shell, Shell::Start(
                                             {*store, clock, *log, metrics},
                                             [&](absl::Time now, CoreOutput* output) {
                                               return Core::Recover(CoreConfig(), *store, Rng(1),
                                                                    now, output);
                                             },
                                             nullptr));
  EXPECT_THAT(
      RpcServer::Start(*shell, {.listen = coordinator_->address()}),
      testing::StatusIs(absl::StatusCode::kUnavailable, HasSubstr(coordinator_->address())));
  EXPECT_THAT(RpcServer::Start(*shell, {.listen = "nowhere"}),
              testing::StatusIs(absl::StatusCode::kInvalidArgument));
  // An earlier port that someone else has is given up for one of the system's choice.
  ASSERT_OK_AND_ASSIGN(
      const auto server,
      RpcServer::Start(*shell, {.listen = "127.0.0.1:0", .earlier_port = coordinator_->port()}));
  EXPECT_NE(server->address(), coordinator_->address());
  server->Stop(absl::Seconds(1));
}

TEST_F(RpcTest, Drain_EndsEveryStreamWithUnavailableInTime) {
  MustSubmit("gpt");
  Daemon daemon(*coordinator_, "w0", 1);
  daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
  v1::GetJobRequest get;
  get.set_name("gpt");
  const auto job_context = Context();
  const auto job_watch = stub_->WatchJob(job_context.get(), get);
  const auto event_context = Context();
  const auto event_watch = stub_->WatchEvents(event_context.get(), {});
  // gRPC cancels a call that reaches a server which has begun to stop.
  v1::Job job;
  ASSERT_TRUE(job_watch->Read(&job));
  v1::Event event;
  ASSERT_TRUE(event_watch->Read(&event));
  RealClock clock;
  const absl::Duration start = clock.Monotonic();
  coordinator_->Stop();
  // Streams end by themselves; the grace for stuck calls is not used up.
  EXPECT_LT(clock.Monotonic() - start, kGrace / 2);
  while (job_watch->Read(&job)) {
  }
  EXPECT_EQ(job_watch->Finish().error_code(), grpc::UNAVAILABLE);
  while (event_watch->Read(&event)) {
  }
  EXPECT_EQ(event_watch->Finish().error_code(), grpc::UNAVAILABLE);
  v1::FromCoordinator message;
  while (daemon.Read(&message)) {
  }
  EXPECT_EQ(daemon.Finish().error_code(), grpc::UNAVAILABLE);
}

// What keeps a connection open is an answer, not the silence of a peer that is gone.
TEST_F(RpcTest, HalfOpenConnection_IsClosedWhenItsPingsAreNotAnswered) {
  Coordinator coordinator(directory_ + "/other", /*keepalive=*/absl::Seconds(1));
  testing::Proxy proxy(coordinator.address());
  Daemon daemon(Coordinator::ChannelTo(proxy.address()), "w0", 1);
  daemon.ReadUntil([](const auto& message) { return message.has_welcome(); });
  proxy.Freeze();
  EXPECT_TRUE(proxy.AwaitServerGone(kGrace)) << "the coordinator kept it";
  daemon.Cancel();
}

}  // namespace
}  // namespace muster::coordinator
