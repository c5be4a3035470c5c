// The daemon's session with the coordinator: how soon it dials again, and when it gives up a
// connection on which nobody answers.
#include "worker/daemon/session_client.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "muster/v1/worker_service.grpc.pb.h"
#include "tests/support/proxy.h"
#include "tests/support/seed.h"

namespace muster::worker {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);

// Runs posted work when the test asks for it and records every delay.
class RecordingLoop : public Loop {
 public:
  void Post(absl::AnyInvocable<void()> work) override { ready_.push_back(std::move(work)); }
  void PostAfter(absl::Duration delay, absl::AnyInvocable<void()> work) override {
    delays_.push_back(delay);
    ready_.push_back(std::move(work));
  }
  bool OnLoop() const override { return running_; }

  // Runs the work of every timer.
  void RunOnce() {
    running_ = true;
    for (auto work = std::exchange(ready_, {}); !work.empty(); work.pop_front()) work.front()();
    running_ = false;
  }
  const std::vector<absl::Duration>& delays() const { return delays_; }

 private:
  std::deque<absl::AnyInvocable<void()>> ready_;
  std::vector<absl::Duration> delays_;
  bool running_ = false;
};

SessionEvents Deaf() {
  return {[](SessionId, const WorkerAddress&) {}, [](SessionId, v1::FromCoordinator) {},
          [](SessionId, absl::Status) {}};
}

TEST(SessionClient, CoordinatorAway_IsDialledSoonAndAtLeastOnceASecond) {
  RecordingLoop loop;
  SessionClientOptions options;
  options.coordinator = "file:/nonexistent/address";  // fails at once, on the loop
  const auto client =
      SessionClient::Make(options, loop, Rng(testing::TestSeed()), Logger::Discard(), Deaf());
  client->Start();
  for (int dial = 0; dial < 40; ++dial) loop.RunOnce();
  client->Stop();
  ASSERT_EQ(loop.delays().size(), 41u);
  absl::Duration base = options.backoff_initial;
  absl::Duration first_five;
  for (size_t i = 0; i < loop.delays().size(); ++i) {
    EXPECT_GE(loop.delays()[i], base / 2) << i;
    EXPECT_LE(loop.delays()[i], base) << i;
    if (i < 5) first_five += loop.delays()[i];
    base = std::min(base * 2, options.backoff_max);
  }
  // A restarted coordinator serves again well within a second, and is found within another.
  EXPECT_EQ(options.backoff_max, absl::Seconds(1));
  EXPECT_LE(first_five, absl::Seconds(2));
  // Jitter keeps a thousand daemons from dialling at the same time.
  const std::set<absl::Duration> late(loop.delays().begin() + 10, loop.delays().end());
  EXPECT_GT(late.size(), 20u);
}

// Welcomes every session and then sends nothing.
class Welcomer : public v1::WorkerService::Service {
 public:
  using Stream = grpc::ServerReaderWriter<v1::FromCoordinator, v1::FromWorker>;

  Welcomer() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);  // as the coordinator's server
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~Welcomer() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  grpc::Status Session(grpc::ServerContext*, Stream* stream) override {
    v1::FromWorker message;
    while (stream->Read(&message)) {
      if (!message.has_hello()) continue;
      v1::FromCoordinator welcome;
      welcome.mutable_welcome()->set_heartbeat_interval_ms(100);
      stream->Write(welcome);
    }
    return grpc::Status::OK;
  }
  const std::string& address() const { return address_; }

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

TEST(SessionClient, CoordinatorThatStopsAnswering_IsGivenUpAndFoundAgain) {
  Welcomer coordinator;
  testing::Proxy proxy(coordinator.address());
  RealClock clock;
  ThreadLoop loop(clock);
  Mutex mutex;
  int welcomed = 0;
  int down = 0;
  SessionClientOptions options;
  options.coordinator = proxy.address();
  options.dead_peer_timeout = absl::Milliseconds(300);
  std::unique_ptr<SessionClient> client;
  SessionEvents events;
  events.up = [&](SessionId session, const WorkerAddress&) {
    v1::FromWorker hello;
    hello.mutable_hello()->set_worker("w0");
    client->Send(session, hello);
  };
  events.message = [&](SessionId, v1::FromCoordinator message) {
    MutexLock lock(&mutex);
    welcomed += message.has_welcome() ? 1 : 0;
  };
  events.down = [&](SessionId, absl::Status) {
    MutexLock lock(&mutex);
    ++down;
  };
  client = SessionClient::Make(options, loop, Rng(testing::TestSeed()), Logger::Discard(), events);
  const auto reaches = [&mutex](int& counter, int count) {
    MutexLock lock(&mutex);
    auto reached = [&counter, count] { return counter >= count; };
    return mutex.AwaitWithTimeout(Condition(&reached), kPatience);
  };
  loop.Post([&client] { client->Start(); });
  EXPECT_TRUE(reaches(welcomed, 1));
  proxy.Freeze();
  EXPECT_TRUE(reaches(down, 1)) << "a connection without answers was kept";
  EXPECT_TRUE(reaches(welcomed, 2)) << "it was not dialed again";
  client->Stop();
  loop.Stop();
}

// Closes every session because the worker's name belongs to another daemon.
class Refuser : public v1::WorkerService::Service {
 public:
  Refuser() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~Refuser() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  grpc::Status Session(
      grpc::ServerContext*,
      grpc::ServerReaderWriter<v1::FromCoordinator, v1::FromWorker>* stream) override {
    v1::FromWorker message;
    stream->Read(&message);
    return grpc::Status(grpc::StatusCode::ALREADY_EXISTS, "run muster admin remove-worker w0");
  }
  const std::string& address() const { return address_; }

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

// Keeps its lines.
class KeepingLogger : public Logger {
 public:
  void Write(LogLevel, absl::string_view, Fields fields) override {
    MutexLock lock(&mutex_);
    for (const LogField& field : fields) {
      if (field.key == "error") errors_.push_back(std::get<std::string>(field.value));
    }
  }
  std::vector<std::string> errors() {
    MutexLock lock(&mutex_);
    return errors_;
  }

 private:
  Mutex mutex_;
  std::vector<std::string> errors_ ABSL_GUARDED_BY(mutex_);
};

TEST(SessionClient, NameOfAnotherDaemon_IsLoggedWithWhatToDoAndDialledAgain) {
  Refuser coordinator;
  RealClock clock;
  ThreadLoop loop(clock);
  const auto log = std::make_shared<KeepingLogger>();
  SessionClientOptions options;
  options.coordinator = coordinator.address();
  std::unique_ptr<SessionClient> client;
  Mutex mutex;
  int refused = 0;
  SessionEvents events = Deaf();
  events.up = [&](SessionId session, const WorkerAddress&) {
    v1::FromWorker hello;
    hello.mutable_hello()->set_worker("w0");
    client->Send(session, hello);
  };
  events.down = [&](SessionId, const absl::Status& status) {
    MutexLock lock(&mutex);
    if (status.code() == absl::StatusCode::kAlreadyExists) ++refused;
  };
  client = SessionClient::Make(options, loop, Rng(testing::TestSeed()), log, events);
  loop.Post([&client] { client->Start(); });
  {
    MutexLock lock(&mutex);
    auto thrice = [&refused] { return refused >= 3; };
    EXPECT_TRUE(mutex.AwaitWithTimeout(Condition(&thrice), kPatience));
  }
  client->Stop();
  loop.Stop();
  EXPECT_THAT(log->errors(),
              ::testing::Contains(::testing::HasSubstr("run muster admin remove-worker w0")));
}

// Reads Hello, and nothing more until it is told to.
class SlowReader : public v1::WorkerService::Service {
 public:
  SlowReader() {
    grpc::ServerBuilder builder;
    int port = 0;
    builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
    builder.RegisterService(this);
    server_ = builder.BuildAndStart();
    address_ = absl::StrCat("127.0.0.1:", port);
  }
  ~SlowReader() override {
    server_->Shutdown(std::chrono::system_clock::now());
    server_->Wait();
  }
  grpc::Status Session(grpc::ServerContext*,
                       grpc::ServerReaderWriter<v1::FromCoordinator, v1::FromWorker>* s) override {
    v1::FromWorker message;
    s->Read(&message);
    reads_.WaitForNotification();
    while (s->Read(&message)) {
      MutexLock lock(&mutex_);
      ++observed_;
      newest_ = message.observed().applied_revision();
    }
    return grpc::Status::OK;
  }
  void Read() { reads_.Notify(); }
  // How many Observed came, once that of `revision` has come; 0: it did not.
  int ObservedUntil(uint64_t revision) {
    MutexLock lock(&mutex_);
    auto come = [this, revision]()
                    ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return newest_ == revision; };
    return mutex_.AwaitWithTimeout(Condition(&come), kPatience) ? observed_ : 0;
  }
  const std::string& address() const { return address_; }

 private:
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
  Notification reads_;
  Mutex mutex_;
  int observed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t newest_ ABSL_GUARDED_BY(mutex_) = 0;
};

TEST(SessionClient, CoordinatorThatReadsSlowly_GetsTheNewestObservedAndFewOlderOnes) {
  constexpr uint64_t kReports = 2000;
  SlowReader coordinator;
  RealClock clock;
  ThreadLoop loop(clock);
  SessionClientOptions options;
  options.coordinator = coordinator.address();
  std::unique_ptr<SessionClient> client;
  Notification sent;
  SessionEvents events = Deaf();
  events.up = [&](SessionId session, const WorkerAddress&) {
    v1::FromWorker hello;
    hello.mutable_hello()->set_worker("w0");
    client->Send(session, hello);
    for (uint64_t revision = 1; revision <= kReports; ++revision) {
      v1::FromWorker report;
      report.mutable_observed()->set_applied_revision(revision);
      report.mutable_observed()->add_attempts()->set_refusal(std::string(100'000, 'x'));
      client->Send(session, std::move(report));
    }
    sent.Notify();
  };
  client = SessionClient::Make(options, loop, Rng(testing::TestSeed()), Logger::Discard(), events);
  loop.Post([&client] { client->Start(); });
  sent.WaitForNotification();
  coordinator.Read();
  const int received = coordinator.ObservedUntil(kReports);
  EXPECT_GT(received, 0) << "the newest never came";
  EXPECT_LT(received, 200) << "the rest was queued";
  client->Stop();
  loop.Stop();
}

}  // namespace
}  // namespace muster::worker
