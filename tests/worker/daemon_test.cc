// The whole daemon in this process, with real rank processes, against a scripted coordinator on
// loopback and a rank's client on the daemon's socket.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/proc.h"
#include "muster/v1/rank_service.grpc.pb.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "tests/support/status_matchers.h"
#include "worker/daemon/daemon.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/shim.h"
#include "worker/rank/daemon_client.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kPatience = absl::Seconds(30);

// Keeps every message that it gets, and sends what the test tells it to.
class FakeCoordinator : public v1::WorkerService::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::FromCoordinator, v1::FromWorker>;

  FakeCoordinator(std::string address_file, uint64_t term) : term_(term) {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    EXPECT_THAT(PosixFileSystem()->WriteAtomically(address_file, absl::StrCat("127.0.0.1:", port)),
                IsOk());
  }
  ~FakeCoordinator() override {
    {
      MutexLock lock(&mutex_);
      for (grpc::ServerContext* context : contexts_) context->TryCancel();
    }
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }

  grpc::Status Session(grpc::ServerContext* context, Stream* stream) override {
    {
      MutexLock lock(&mutex_);
      contexts_.insert(context);
    }
    v1::FromWorker message;
    while (stream->Read(&message)) {
      MutexLock lock(&mutex_);
      if (message.has_hello()) {
        stream_ = stream;
        v1::FromCoordinator welcome;
        welcome.mutable_welcome()->set_heartbeat_interval_ms(50);
        Write(welcome);
        Write(desired_);
      }
      received_.push_back(message);
    }
    MutexLock lock(&mutex_);
    if (stream_ == stream) stream_ = nullptr;
    contexts_.erase(context);
    return grpc::Status::OK;
  }

  // Sends this Desired now, and at the start of each later session.
  void Desire(const std::vector<v1::DesiredAttempt>& attempts) {
    MutexLock lock(&mutex_);
    desired_.mutable_desired()->clear_attempts();
    desired_.mutable_desired()->set_revision(desired_.desired().revision() + 1);
    for (const auto& attempt : attempts) *desired_.mutable_desired()->add_attempts() = attempt;
    Write(desired_);
  }
  void Say(v1::FromCoordinator message) {
    MutexLock lock(&mutex_);
    Write(message);
  }

  // The first message that `matches`, of those received; waits for one if there is none.
  v1::FromWorker Await(const std::function<bool(const v1::FromWorker&)>& matches) {
    MutexLock lock(&mutex_);
    v1::FromWorker found;
    size_t seen = 0;
    auto any = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
      for (; seen < received_.size(); ++seen) {
        if (!matches(received_[seen])) continue;
        found = received_[seen];
        return true;
      }
      return false;
    };
    if (!mutex_.AwaitWithTimeout(Condition(&any), kPatience)) {
      ADD_FAILURE() << "no such message among " << received_.size() << "; the last: "
                    << (received_.empty() ? "none" : received_.back().DebugString());
    }
    return found;
  }
  // Waits until the only rank is in `state`, and returns what is observed of it.
  v1::ObservedRank AwaitRank(v1::RankState state) {
    const auto rank_in = [state](const v1::FromWorker& message) {
      return message.has_observed() && message.observed().attempts_size() == 1 &&
             message.observed().attempts(0).ranks(0).state() == state;
    };
    return Await(rank_in).observed().attempts(0).ranks(0);
  }
  size_t PositionOf(const std::function<bool(const v1::FromWorker&)>& matches) {
    MutexLock lock(&mutex_);
    return static_cast<size_t>(std::find_if(received_.begin(), received_.end(), matches) -
                               received_.begin());
  }

 private:
  void Write(v1::FromCoordinator message) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (stream_ == nullptr || message.kind_case() == v1::FromCoordinator::KIND_NOT_SET) return;
    message.set_cluster_id("cluster-1");
    message.set_leader_term(term_);
    stream_->Write(message);
  }

  const uint64_t term_;
  std::unique_ptr<grpc::Server> server_;
  Mutex mutex_;
  Stream* stream_ ABSL_GUARDED_BY(mutex_) = nullptr;
  std::set<grpc::ServerContext*> contexts_ ABSL_GUARDED_BY(mutex_);
  v1::FromCoordinator desired_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::FromWorker> received_ ABSL_GUARDED_BY(mutex_);
};

class DaemonTest : public ::testing::Test {
 protected:
  DaemonTest() {
    std::string name = ::testing::TempDir() + "muster-daemon-XXXXXX";
    directory_ = ::mkdtemp(name.data());
    StartCoordinator();
    StartDaemon();
  }
  ~DaemonTest() override {
    daemon_.reset();
    coordinator_.reset();
    for (const pid_t pid : FindProcesses(0, kRunDirectoryVariable, RunDirectory())) {
      ::kill(pid, SIGKILL);
    }
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  void StartCoordinator() {
    coordinator_.reset();
    coordinator_ = std::make_unique<FakeCoordinator>(directory_ + "/address", ++term_);
  }
  DaemonOptions Options() {
    DaemonOptions options;
    options.name = "w0";
    options.coordinator = "file:" + directory_ + "/address";
    options.state_directory = directory_ + "/state";
    options.slots = 2;
    options.shim_binary = MUSTER_WORKER_BINARY;
    options.rank_command = [this](const v1::RankAssignment&) {
      return std::vector<std::string>{"/bin/sh", "-c", script_};
    };
    return options;
  }
  void StartDaemon() {
    daemon_.reset();
    auto daemon = Daemon::Start(Options(), clock_, *metrics_, Logger::Discard());
    ASSERT_TRUE(daemon.ok()) << daemon.status();
    daemon_ = std::move(*daemon);
  }

  static v1::DesiredAttempt Wanted(v1::DesiredPhase phase) {
    v1::DesiredAttempt attempt;
    attempt.set_job_id("job-a");
    attempt.set_epoch(1);
    attempt.set_phase(phase);
    attempt.set_stop_grace_ms(10000);
    attempt.mutable_spec()->set_name("job");
    v1::RankAssignment& rank = *attempt.add_ranks();
    rank.set_device("cpu:0");
    rank.set_world_size(1);
    return attempt;
  }
  std::string RunDirectory() const { return directory_ + "/state/attempts/job-a.e1/rank-0"; }
  std::string Fifo(const std::string& name) {
    const std::string path = directory_ + "/" + name;
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    return path;
  }
  v1::ObservedRank RunRank() {
    coordinator_->Desire({Wanted(v1::DESIRED_PHASE_RUNNING)});
    return coordinator_->AwaitRank(v1::RANK_STATE_RUNNING);
  }
  std::unique_ptr<DaemonClient> Client(uint64_t epoch = 1,
                                       absl::AnyInvocable<void(absl::Status)> on_aborted = {},
                                       DaemonClientOptions options = {}) {
    options.job_id = "job-a";
    options.epoch = epoch;
    options.socket = daemon_->socket();
    options.report_interval = absl::Milliseconds(20);
    options.on_aborted = std::move(on_aborted);
    auto client = DaemonClient::Make(std::move(options));
    EXPECT_TRUE(client.ok()) << client.status();
    return std::move(*client);
  }
  void Verdict(int64_t step) {
    v1::FromCoordinator message;
    message.mutable_verdict()->set_job_id("job-a");
    message.mutable_verdict()->set_epoch(1);
    message.mutable_verdict()->set_step(step);
    coordinator_->Say(message);
  }

  RealClock clock_;
  std::unique_ptr<metrics::Registry> metrics_ = metrics::DiscardRegistry();
  std::string directory_;
  std::string script_ = "exec sleep 1000";
  uint64_t term_ = 0;
  std::unique_ptr<FakeCoordinator> coordinator_;
  std::unique_ptr<Daemon> daemon_;
};

TEST_F(DaemonTest, Hello_TellsWhoItIs) {
  const v1::Hello hello =
      coordinator_->Await([](const auto& message) { return message.has_hello(); }).hello();
  EXPECT_EQ(hello.worker(), "w0");
  EXPECT_EQ(hello.devices_size(), 2);
  EXPECT_EQ(hello.devices(1).name(), "cpu:1");
  EXPECT_GT(hello.pid(), 0);
  EXPECT_FALSE(hello.boot_id().empty());
}

TEST_F(DaemonTest, TopologyFile_FillsInDevicesAndLabels) {
  daemon_.reset();
  DaemonOptions options = Options();
  options.topology_file = "t.yaml";
  ASSERT_OK_AND_ASSIGN(options.topology,
                       spec::ParseMachineTopology("labels: {rack: r1, zone: a}\n"
                                                  "devices: [{name: \"cpu:1\", numa: 1}]",
                                                  "t.yaml"));
  options.labels["rack"] = "r2";
  ASSERT_OK_AND_ASSIGN(daemon_, Daemon::Start(options, clock_, *metrics_, Logger::Discard()));
  const auto labelled = [](const auto& message) {
    return message.has_hello() && message.hello().labels_size() > 0;
  };
  const v1::Hello hello = coordinator_->Await(labelled).hello();
  EXPECT_EQ(hello.labels().at("zone"), "a");
  EXPECT_EQ(hello.labels().at("rack"), "r2") << "the flag goes before the file";
  EXPECT_EQ(hello.devices(1).numa_node(), 1);
  daemon_.reset();
  options.topology.devices[0].set_name("cpu:7");
  EXPECT_THAT(Daemon::Start(options, clock_, *metrics_, Logger::Discard()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument,
                       HasSubstr("t.yaml: devices[0].name: this worker offers no device 'cpu:7'")));
}

TEST_F(DaemonTest, Attempt_FromRunningToReleased) {
  const v1::ObservedRank running = RunRank();
  EXPECT_GT(running.pid(), 0);
  coordinator_->Desire({Wanted(v1::DESIRED_PHASE_STOPPED)});
  const v1::ObservedRank released = coordinator_->AwaitRank(v1::RANK_STATE_RELEASED);
  EXPECT_EQ(released.exit().signal(), SIGTERM);
  EXPECT_EQ(released.exit().cause(), v1::CAUSE_CANCELLED);
  EXPECT_FALSE(ReadProcessStat(static_cast<pid_t>(running.pid())).has_value());
}

TEST_F(DaemonTest, RankWithoutProgress_AnswersAndSaysWhereItsCollectivesAre) {
  RunRank();
  DaemonClientOptions options;
  options.stuck_after = absl::Milliseconds(300);
  options.on_stuck = [](v1::RankProgress& progress) {
    progress.clear_groups();
    progress.add_groups()->set_group("dp");
  };
  const auto client = Client(1, {}, std::move(options));
  v1::RankProgress progress;
  progress.set_step(3);
  client->Report(progress);
  const auto answers = [](uint64_t least) {
    return [least](const v1::FromWorker& message) {
      if (!message.has_observed() || message.observed().attempts_size() != 1) return false;
      const v1::RankProgress& seen = message.observed().attempts(0).ranks(0).progress();
      return seen.step() == 3 && seen.answers() >= least && seen.groups_size() == 1;
    };
  };
  coordinator_->Await(answers(2));
  progress.set_step(4);
  client->Report(progress);
  coordinator_->Await([](const v1::FromWorker& message) {
    if (!message.has_observed() || message.observed().attempts_size() != 1) return false;
    const v1::RankProgress& seen = message.observed().attempts(0).ranks(0).progress();
    return seen.step() == 4 && seen.answers() == 0 && seen.groups_size() == 0;
  });
}

TEST_F(DaemonTest, Coordinator_MovesToAnotherPort_IsFoundAndTheRankTrainsOn) {
  const v1::ObservedRank before = RunRank();
  StartCoordinator();
  coordinator_->Desire({Wanted(v1::DESIRED_PHASE_RUNNING)});
  EXPECT_EQ(coordinator_->AwaitRank(v1::RANK_STATE_RUNNING).pid(), before.pid());
  EXPECT_TRUE(ReadProcessStat(static_cast<pid_t>(before.pid())).has_value());
}

TEST_F(DaemonTest, Daemon_Restarts_SameProcessIsReportedAndItsExitIsExact) {
  const std::string go = Fifo("go");
  script_ = absl::StrCat("read line < ", go, "; exit 9");
  const v1::ObservedRank before = RunRank();
  StartDaemon();
  std::ofstream(go) << "go\n";
  const v1::ObservedRank after = coordinator_->AwaitRank(v1::RANK_STATE_RELEASED);
  EXPECT_EQ(after.pid(), before.pid());
  EXPECT_EQ(after.exit().code(), 9);
}

TEST_F(DaemonTest, Client_Reports_ProgressArrivesAndStopIsSeen) {
  // The rank ignores SIGTERM, so that the attempt lasts until the client has seen the stop.
  script_ = "trap '' TERM; while :; do sleep 1000; done";
  RunRank();
  const auto client = Client();
  v1::RankProgress progress;
  progress.set_phase("training");
  progress.set_step(17);
  client->Report(progress);
  ASSERT_THAT(client->Flush(kPatience), IsOk());
  EXPECT_EQ(coordinator_->AwaitRank(v1::RANK_STATE_TRAINING).progress().step(), 17);
  EXPECT_FALSE(client->stop_requested());
  v1::DesiredAttempt stop = Wanted(v1::DESIRED_PHASE_STOPPED);
  stop.set_stop_grace_ms(60000);
  coordinator_->Desire({stop});
  coordinator_->Await([](const auto& message) {
    return message.has_observed() && message.observed().applied_revision() == 2;
  });
  client->ReportNow(progress);
  ASSERT_THAT(client->Flush(kPatience), IsOk());
  EXPECT_TRUE(client->stop_requested());
}

TEST_F(DaemonTest, Client_KeyValue_GoesThroughTheCoordinator) {
  RunRank();
  const auto client = Client();
  std::thread coordinator([this] {
    const v1::KeyValuePut put =
        coordinator_->Await([](const auto& message) { return message.has_put(); }).put();
    EXPECT_EQ(put.key(), "comm/world/0");
    EXPECT_EQ(put.value(), "host:1");
    v1::FromCoordinator reply;
    reply.mutable_value()->set_request(put.request());
    coordinator_->Say(reply);
    const v1::KeyValueGet get =
        coordinator_->Await([](const auto& message) { return message.has_get(); }).get();
    EXPECT_EQ(get.key(), "comm/world/1");
    reply.mutable_value()->set_request(get.request());
    reply.mutable_value()->set_value("host:2");
    coordinator_->Say(reply);
  });
  EXPECT_THAT(client->Put("comm/world/0", "host:1"), IsOk());
  ASSERT_OK_AND_ASSIGN(const std::string value, client->Get("comm/world/1", kPatience));
  EXPECT_EQ(value, "host:2");
  coordinator.join();
  EXPECT_THAT(client->Get("never", absl::Milliseconds(50)).status(),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("never")));
}

TEST_F(DaemonTest, Commit_PendingWhileCoordinatorIsAway_ComesBeforeTheExitAfterADaemonRestart) {
  const std::string go = Fifo("go");
  script_ = absl::StrCat("read line < ", go, "; exit 0");
  RunRank();
  const auto client = Client();
  coordinator_.reset();
  v1::CheckpointRecord checkpoint;
  checkpoint.set_step(50);
  checkpoint.set_path("/checkpoints/step-50");
  client->Commit(checkpoint);
  ASSERT_THAT(client->Flush(kPatience), IsOk());  // the daemon has stored it
  daemon_.reset();
  std::ofstream(go) << "go\n";
  StartDaemon();
  StartCoordinator();
  coordinator_->Desire({Wanted(v1::DESIRED_PHASE_RUNNING)});
  const auto is_commit = [](const v1::FromWorker& message) { return message.has_commit(); };
  const auto has_exit = [](const v1::FromWorker& message) {
    const v1::Observed& observed =
        message.has_hello() ? message.hello().observed() : message.observed();
    return observed.attempts_size() == 1 && observed.attempts(0).ranks(0).has_exit();
  };
  EXPECT_EQ(coordinator_->Await(is_commit).commit().checkpoint().path(), "/checkpoints/step-50");
  EXPECT_THAT(client->WaitCommitted(50, absl::ZeroDuration()),
              StatusIs(absl::StatusCode::kDeadlineExceeded));
  Verdict(50);
  coordinator_->Await(has_exit);
  EXPECT_LT(coordinator_->PositionOf(is_commit), coordinator_->PositionOf(has_exit));
  EXPECT_THAT(client->WaitCommitted(50, kPatience), IsOk());
  EXPECT_EQ(client->last_committed_step(), 50);
}

// A daemon that takes the first commit and never answers it, as one that is stopped or that dies
// during the call does.
class DeafOnce final : public v1::RankService::Service {
 public:
  grpc::Status Commit(grpc::ServerContext*, const v1::CommitRequest*,
                      v1::CommitResponse*) override {
    const int call = ++calls_;
    if (call == 2) again_.Notify();
    if (call > 1) return grpc::Status::OK;
    again_.WaitForNotificationWithTimeout(kPatience);
    return grpc::Status(grpc::StatusCode::UNAVAILABLE, "too late");
  }
  grpc::Status Report(grpc::ServerContext*, const v1::ReportRequest*,
                      v1::ReportResponse*) override {
    return grpc::Status::OK;
  }
  int calls() const { return calls_; }

 private:
  std::atomic<int> calls_{0};
  Notification again_;
};

TEST(DaemonClient, CommitThatIsNotAnswered_IsRepeated) {
  std::string directory = ::testing::TempDir() + "muster-deaf-XXXXXX";
  ASSERT_NE(::mkdtemp(directory.data()), nullptr);
  DeafOnce daemon;
  grpc::ServerBuilder builder;
  builder.AddListeningPort("unix:" + directory + "/s", grpc::InsecureServerCredentials());
  builder.RegisterService(&daemon);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  DaemonClientOptions options;
  options.job_id = "job-a";
  options.epoch = 1;
  options.socket = directory + "/s";
  options.attempt_timeout = absl::Milliseconds(500);
  ASSERT_OK_AND_ASSIGN(auto client, DaemonClient::Make(std::move(options)));
  v1::CheckpointRecord checkpoint;
  checkpoint.set_step(50);
  client->Commit(checkpoint);
  EXPECT_THAT(client->Flush(kPatience), IsOk());
  EXPECT_GE(daemon.calls(), 2);
  client.reset();
  server->Shutdown();
  std::filesystem::remove_all(directory);
}

TEST_F(DaemonTest, Client_OfAStaleEpoch_IsAbortedOnce) {
  RunRank();
  Notification told;
  const auto client = Client(/*epoch=*/7, [&told](absl::Status status) {
    EXPECT_THAT(status, StatusIs(absl::StatusCode::kAborted, HasSubstr("epoch 7")));
    told.Notify();  // a second call would fail the test
  });
  EXPECT_THAT(client->Put("key", "value"), StatusIs(absl::StatusCode::kAborted));
  ASSERT_TRUE(told.WaitForNotificationWithTimeout(kPatience));
  EXPECT_TRUE(client->aborted());
  EXPECT_THAT(client->Flush(kPatience), StatusIs(absl::StatusCode::kAborted));
}

TEST_F(DaemonTest, Notice_FromTheRank_CountsAsDeliveredOnceTheCoordinatorHasTakenIt) {
  RunRank();
  const auto client = Client();
  v1::Evaluation evaluation;
  evaluation.set_step(100);
  evaluation.set_loss(1.5);
  client->Notify(evaluation);
  const v1::RankNotice notice =
      coordinator_->Await([](const auto& message) { return message.has_notice(); }).notice();
  EXPECT_EQ(notice.evaluation().step(), 100);
  EXPECT_EQ(notice.job_id(), "job-a");
  const v1::KeyValueGet get =
      coordinator_->Await([](const auto& message) { return message.has_get(); }).get();
  EXPECT_THAT(client->Flush(absl::Milliseconds(100)),
              StatusIs(absl::StatusCode::kDeadlineExceeded, HasSubstr("1 notices")));
  v1::FromCoordinator taken;
  taken.mutable_value()->set_request(get.request());
  taken.mutable_value()->set_status_code(static_cast<int>(absl::StatusCode::kInvalidArgument));
  coordinator_->Say(taken);
  EXPECT_OK(client->Flush(kPatience));
}

TEST_F(DaemonTest, LogRequest_IsAnsweredByOffset) {
  script_ = "echo hello";
  coordinator_->Desire({Wanted(v1::DESIRED_PHASE_RUNNING)});
  coordinator_->AwaitRank(v1::RANK_STATE_RELEASED);
  v1::FromCoordinator ask;
  ask.mutable_log()->set_request(5);
  ask.mutable_log()->set_job_id("job-a");
  ask.mutable_log()->set_epoch(1);
  ask.mutable_log()->set_offset(2);
  coordinator_->Say(ask);
  const v1::LogReply reply =
      coordinator_->Await([](const auto& message) { return message.has_log(); }).log();
  EXPECT_EQ(reply.request(), 5u);
  EXPECT_EQ(reply.data(), "llo\n");
  EXPECT_EQ(reply.offset(), 2);
  EXPECT_TRUE(reply.end());
  EXPECT_TRUE(reply.closed());
  ask.mutable_log()->set_request(6);
  ask.mutable_log()->set_epoch(99);
  coordinator_->Say(ask);
  const v1::LogReply missing = coordinator_
                                   ->Await([](const auto& message) {
                                     return message.has_log() && message.log().request() == 6;
                                   })
                                   .log();
  EXPECT_EQ(missing.status_code(), static_cast<int>(absl::StatusCode::kNotFound));
}

TEST_F(DaemonTest, CollectivesAndProfile_HaveAnswersOfTheirOwn) {
  RunRank();
  v1::FromCoordinator ask;
  v1::CollectivesRequest& collectives = *ask.mutable_collectives();
  collectives.set_job_id("job-a");
  collectives.set_epoch(1);
  collectives.set_number(7);
  const auto record = [&](uint64_t request) {
    collectives.set_request(request);
    coordinator_->Say(ask);
    return coordinator_
        ->Await([&](const auto& message) { return message.collectives().request() == request; })
        .collectives();
  };
  const v1::CollectivesReply none = record(1);
  EXPECT_EQ(none.status_code(), 0) << none.status_message();
  EXPECT_FALSE(none.has_record());
  const std::string path = RunDirectory() + CollectivesFile(7);
  v1::CollectiveRecord left;
  left.add_collectives()->set_operation("all-reduce");
  std::ofstream(path) << left.SerializeAsString();
  EXPECT_EQ(record(2).record().collectives(0).operation(), "all-reduce");
  std::ofstream(path) << "no record";
  EXPECT_EQ(record(3).status_code(), static_cast<int>(absl::StatusCode::kDataLoss));
  std::ofstream(path) << std::string(5 << 20, 'x');
  EXPECT_EQ(record(4).status_code(), static_cast<int>(absl::StatusCode::kResourceExhausted));

  v1::FromCoordinator ask_profile;
  v1::ProfileRequest& profile = *ask_profile.mutable_profile();
  profile.set_job_id("job-a");
  profile.set_epoch(1);
  profile.mutable_steps()->set_first_step(3);
  profile.mutable_steps()->set_steps(2);
  const auto trace = [&](uint64_t request) {
    profile.set_request(request);
    coordinator_->Say(ask_profile);
    return coordinator_
        ->Await([&](const auto& message) { return message.profile().request() == request; })
        .profile();
  };
  EXPECT_FALSE(trace(5).recorded());
  std::ofstream(RunDirectory() + ProfileTraceFile(3, 2)) << "[{}]";
  profile.set_offset(1);
  const v1::ProfileReply recorded = trace(6);
  EXPECT_TRUE(recorded.recorded());
  EXPECT_TRUE(recorded.end());
  EXPECT_EQ(recorded.data(), "{}]");
}

TEST_F(DaemonTest, SecondDaemon_OnTheSameStateDirectory_IsRefused) {
  EXPECT_THAT(Daemon::Start(Options(), clock_, *metrics_, Logger::Discard()).status(),
              StatusIs(absl::StatusCode::kFailedPrecondition, HasSubstr("pid")));
}

TEST_F(DaemonTest, EndRanks_LeavesNothingRunningAndSaysWhy) {
  const v1::ObservedRank running = RunRank();
  daemon_->EndRanks();
  EXPECT_FALSE(ReadProcessStat(static_cast<pid_t>(running.pid())).has_value());
  EXPECT_EQ(coordinator_->AwaitRank(v1::RANK_STATE_EXITED).exit().cause(), v1::CAUSE_PREEMPTED);
}

// Tests with a management library of our own.
class DaemonWithGpusTest : public DaemonTest {
 protected:
  void SetUp() override {
    DaemonTest::SetUp();
    ::setenv("FAKE_NVML", "gpus=2", 1);
    ::setenv("FAKE_NVML_XID", xid_.c_str(), 1);
    daemon_.reset();
    DaemonOptions options = Options();
    options.gpus.emplace();
    options.gpus->library = FAKE_NVML_LIBRARY;
    options.gpus->cuda_major = 13;
    options.gpus->architectures = "90a-real";
    auto daemon = Daemon::Start(options, clock_, *metrics_, Logger::Discard());
    ASSERT_OK(daemon);
    daemon_ = std::move(*daemon);
  }
  void TearDown() override {
    daemon_.reset();  // its thread reads the variables
    ::unsetenv("FAKE_NVML_XID");
    ::unsetenv("FAKE_NVML");
  }
  v1::ObservedRank RunOnTheSecond() {
    v1::DesiredAttempt wanted = Wanted(v1::DESIRED_PHASE_RUNNING);
    wanted.mutable_ranks(0)->set_device("cuda:1");
    coordinator_->Desire({wanted});
    return coordinator_->AwaitRank(v1::RANK_STATE_RUNNING);
  }

  const std::string xid_ = directory_ + "/xid";
};

TEST_F(DaemonWithGpusTest, RankThatLeavesNoReport_ItsEndNamesTheGpu) {
  const v1::ObservedRank running = RunOnTheSecond();
  ::kill(static_cast<pid_t>(running.pid()), SIGKILL);
  const v1::RankExit exit = coordinator_->AwaitRank(v1::RANK_STATE_EXITED).exit();
  EXPECT_THAT(exit.message(), HasSubstr("signal"));
  EXPECT_THAT(exit.message(), HasSubstr("; cuda:1 of worker "));
  EXPECT_THAT(exit.message(), HasSubstr(" is GPU-10000000-aaaa"));
}

TEST_F(DaemonWithGpusTest, RankEndsOnAGpuThatFailed_ItsEndNamesTheErrorAndTheGpu) {
  const v1::ObservedRank running = RunOnTheSecond();
  for (const char* error : {"0 13", "1 79"}) {
    std::ofstream(xid_ + ".new") << error << "\n";
    std::filesystem::rename(xid_ + ".new", xid_);
    while (std::filesystem::exists(xid_)) std::this_thread::yield();
  }
  ::kill(static_cast<pid_t>(running.pid()), SIGKILL);
  // The exit may be reported in the Hello of the session that begins because the GPU failed.
  const v1::RankExit exit = coordinator_->AwaitRank(v1::RANK_STATE_RELEASED).exit();
  EXPECT_THAT(exit.message(), HasSubstr("signal"));
  EXPECT_THAT(exit.message(), HasSubstr("Xid 79 on GPU-10000000-aaaa: it has fallen off the bus"));
  EXPECT_THAT(exit.message(), Not(HasSubstr("Xid 13")));
  EXPECT_THAT(exit.message(), Not(HasSubstr(" is GPU-"))) << "named already";
  // The GPU gets no more ranks; the other one, on which only a program failed, does.
  const auto knows = [](const v1::FromWorker& message) {
    return message.has_hello() && message.hello().devices_size() == 4 &&
           !message.hello().devices(3).unusable().empty();
  };
  const v1::Hello hello = coordinator_->Await(knows).hello();
  EXPECT_EQ(hello.devices(3).name(), "cuda:1");
  EXPECT_THAT(hello.devices(3).unusable(), HasSubstr("Xid 79 on GPU-10000000-aaaa"));
  EXPECT_THAT(hello.devices(3).unusable(), HasSubstr("restart the daemon"));
  EXPECT_EQ(hello.devices(2).unusable(), "");
}

// The driver may lose a GPU without reporting an Xid.
TEST_F(DaemonWithGpusTest, GpuThatIsLostWithoutAnError_IsNamedAndTheOtherIsStillWatched) {
  const auto unusable = [](int device) {
    return [device](const v1::FromWorker& message) {
      return message.has_hello() && message.hello().devices_size() == 4 &&
             !message.hello().devices(device).unusable().empty();
    };
  };
  const auto report = [&](const char* error) {
    std::ofstream(xid_ + ".new") << error << "\n";
    std::filesystem::rename(xid_ + ".new", xid_);
  };
  report("1 lost");
  const v1::Hello hello = coordinator_->Await(unusable(3)).hello();
  EXPECT_THAT(hello.devices(3).unusable(), HasSubstr("GPU-10000000-aaaa: GPU is lost (NVML 15)"));
  EXPECT_THAT(hello.devices(3).unusable(), HasSubstr("reboot the machine"));
  EXPECT_EQ(hello.devices(2).unusable(), "");
  report("0 95");
  EXPECT_THAT(coordinator_->Await(unusable(2)).hello().devices(2).unusable(),
              HasSubstr("Xid 95 on GPU-00000000-aaaa"));
}

TEST_F(DaemonTest, RanksCache_IsThereWhenTheyStart) {
  daemon_.reset();
  std::promise<std::string> cache;
  DaemonOptions options = Options();
  options.rank_command = [&](const v1::RankAssignment& assignment) {
    cache.set_value(assignment.cache_directory());
    return std::vector<std::string>{"/bin/sh", "-c", "exit 0"};
  };
  ASSERT_OK_AND_ASSIGN(daemon_, Daemon::Start(options, clock_, *metrics_, Logger::Discard()));
  coordinator_->Desire({Wanted(v1::DESIRED_PHASE_RUNNING)});
  const std::string path = cache.get_future().get();
  EXPECT_THAT(path, HasSubstr(options.state_directory));
  EXPECT_TRUE(std::filesystem::is_directory(path)) << path;
}

TEST_F(DaemonTest, StateDirectory_TooLongForASocket_GetsAShortOne) {
  DaemonOptions options = Options();
  options.state_directory = directory_ + "/" + std::string(120, 'x');
  ASSERT_OK_AND_ASSIGN(const auto daemon,
                       Daemon::Start(options, clock_, *metrics_, Logger::Discard()));
  EXPECT_LE(daemon->socket().size(), 107u);
  EXPECT_TRUE(std::filesystem::exists(daemon->socket()));
}

TEST_F(DaemonTest, BadOptions_AreRefusedByName) {
  DaemonOptions options = Options();
  options.state_directory = directory_ + "/other";
  options.name = "Not/A/Name";
  EXPECT_THAT(Daemon::Start(options, clock_, *metrics_, Logger::Discard()).status(),
              StatusIs(absl::StatusCode::kInvalidArgument, HasSubstr("Not/A/Name")));
}

}  // namespace
}  // namespace muster::worker
