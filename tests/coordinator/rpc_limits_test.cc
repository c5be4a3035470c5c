// Clients that take all they can: what they are told, and that it costs others nothing.
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/mutex.h"
#include "coordinator/rpc/slots.h"
#include "tests/coordinator/rpc_fixture.h"
#include "tests/support/status_matchers.h"

namespace muster::coordinator {
namespace {

using ::muster::testing::StatusIs;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(Slots, EachKindIsBoundedInAllAndByAddress_UntilOneIsGivenBack) {
  Slots::Bounds bounds = Slots::kDefaultBounds;
  bounds[static_cast<size_t>(SlotKind::kWatcher)] = {3, 2};
  Slots slots(bounds);
  const auto take = [&](const std::string& peer) { return slots.Take(SlotKind::kWatcher, peer); };
  auto first = take("ipv4:10.0.0.1:1");
  auto second = take("ipv4:10.0.0.1:2");
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_THAT(take("ipv4:10.0.0.1:3"),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       AllOf(HasSubstr("2 streams of jobs"), HasSubstr("ipv4:10.0.0.1"))));
  EXPECT_TRUE(slots.Take(SlotKind::kFollower, "ipv4:10.0.0.1:3").ok());
  auto third = take("ipv4:10.0.0.2:1");
  ASSERT_TRUE(third.ok());
  EXPECT_THAT(take("ipv4:10.0.0.2:2"), StatusIs(absl::StatusCode::kResourceExhausted,
                                                HasSubstr("as the coordinator serves")));
  *first = Slots::Slot();
  EXPECT_TRUE(take("ipv4:10.0.0.1:4").ok());
}

TEST(Slots, MayBeGivenBackWhenTheirCountsAreGone) {
  absl::StatusOr<Slots::Slot> slot;
  {
    Slots slots(Slots::kDefaultBounds);
    slot = slots.Take(SlotKind::kCall, "ipv4:10.0.0.1:1");
  }
  ASSERT_OK(slot.status());
}

TEST(PendingCalls, QuestionsToRanks_TakeNoPlaceOfASubmission) {
  PendingCalls calls;
  for (size_t i = 0; i < kCallsWaitingMax; ++i) {
    ASSERT_TRUE(calls.Add<v1::LogReply>([](absl::StatusOr<v1::LogReply>) {}).has_value());
  }
  absl::Status refused;
  EXPECT_FALSE(
      calls.Add<v1::LogReply>([&](absl::StatusOr<v1::LogReply> reply) { refused = reply.status(); })
          .has_value());
  EXPECT_THAT(refused, StatusIs(absl::StatusCode::kResourceExhausted));
  const auto submit = calls.Add<JobReply>([](absl::StatusOr<JobReply>) {});
  ASSERT_TRUE(submit.has_value());
  calls.FailAll(absl::UnavailableError("over"));
  EXPECT_TRUE(calls.Add<v1::LogReply>([](absl::StatusOr<v1::LogReply>) {}).has_value());
}

class RpcLimitsTest : public RpcTest {
 protected:
  // Submits up to 500 jobs while `work` runs, each within a few seconds.
  void SubmitBeside(const std::function<void()>& work) {
    std::atomic<bool> done = false;
    std::thread other([&] {
      const auto stub = v1::JobService::NewStub(coordinator_->Channel());
      for (int i = 0; i < 3 || (!done && i < 500); ++i) {
        v1::SubmitRequest request;
        *request.mutable_spec() = testing::SmallJobSpec(absl::StrCat("job-", i));
        v1::SubmitResponse response;
        const absl::Time before = absl::Now();
        const grpc::Status status = stub->Submit(Context().get(), request, &response);
        EXPECT_TRUE(status.ok()) << status.error_message();
        slowest_ = std::max(slowest_, absl::Now() - before);
      }
    });
    work();
    done = true;
    other.join();
    EXPECT_LT(slowest_, absl::Seconds(5));
  }

  absl::Duration slowest_;
};

constexpr int kStreams = 10'000;

TEST_F(RpcLimitsTest, ClientThatOpensTenThousandStreams_IsRefusedBeyondItsShare) {
  MustSubmit("gpt");
  SubmitBeside([&] {
    const auto stub = v1::JobService::NewStub(coordinator_->Channel());
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReader<v1::Event>>> streams;
    for (int i = 0; i < kStreams; ++i) {
      contexts.push_back(Context());
      streams.push_back(stub->WatchEvents(contexts.back().get(), v1::WatchEventsRequest()));
    }
    size_t served = 0;
    grpc::Status refusal;
    for (int i = 0; i < kStreams; ++i) {
      const size_t at = static_cast<size_t>(i);
      v1::Event event;
      if (streams[at]->Read(&event)) {
        ++served;
        contexts[at]->TryCancel();
        continue;
      }
      refusal = streams[at]->Finish();
      ASSERT_EQ(refusal.error_code(), grpc::RESOURCE_EXHAUSTED) << refusal.error_message();
    }
    // Those that are read first end while later ones are still being opened.
    EXPECT_GE(served, kWatcherSlots.peer);
    EXPECT_LT(served, static_cast<size_t>(kStreams));
    EXPECT_THAT(refusal.error_message(), HasSubstr("as many as one address may have"));
  });
  // The slots come back.
  v1::Event event;
  bool served = false;
  const absl::Time deadline = absl::Now() + absl::Seconds(30);
  while (!served && absl::Now() < deadline) {
    const auto context = Context();
    served = stub_->WatchEvents(context.get(), v1::WatchEventsRequest())->Read(&event);
    context->TryCancel();
  }
  EXPECT_TRUE(served);
}

TEST_F(RpcLimitsTest, TenThousandDaemonStreamsWithoutHello_LeaveRoomForADaemon) {
  SubmitBeside([&] {
    const auto stub = v1::WorkerService::NewStub(coordinator_->Channel());
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReaderWriter<v1::FromWorker, v1::FromCoordinator>>>
        streams;
    // A daemon with a session is not in the way of those that say nothing, nor they in its.
    Daemon daemon(*coordinator_, "w0", 1);
    daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
    for (int i = 0; i < kStreams; ++i) {
      contexts.push_back(Context());
      streams.push_back(stub->Session(contexts.back().get()));
    }
    v1::FromCoordinator message;
    // Of streams on one connection the last ones are refused at once.
    EXPECT_FALSE(streams.back()->Read(&message));
    const grpc::Status refused = streams.back()->Finish();
    EXPECT_EQ(refused.error_code(), grpc::RESOURCE_EXHAUSTED) << refused.error_message();
    EXPECT_THAT(refused.error_message(), HasSubstr("without a Hello"));
    v1::FromWorker heartbeat;
    heartbeat.mutable_observed();
    EXPECT_TRUE(daemon.Write(heartbeat));
    for (const auto& context : contexts) context->TryCancel();
    daemon.Cancel();
  });
}

TEST_F(RpcLimitsTest, RequestOfAHundredMegabytes_IsRefused) {
  SubmitBeside([&] {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxSendMessageSize(-1);
    const auto channel = grpc::CreateCustomChannel(coordinator_->address(),
                                                   grpc::InsecureChannelCredentials(), arguments);
    const auto stub = v1::JobService::NewStub(channel);
    v1::SubmitRequest request;
    *request.mutable_spec() = testing::SmallJobSpec("large");
    request.set_request_id(std::string(100 << 20, 'x'));
    v1::SubmitResponse response;
    const grpc::Status status = stub->Submit(Context().get(), request, &response);
    EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("larger than max"));

    Daemon daemon(channel, "w0", 1);
    daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
    v1::FromWorker forged;
    forged.mutable_put()->set_value(std::string(100 << 20, 'x'));
    daemon.Write(forged);
    v1::FromCoordinator message;
    while (daemon.Read(&message)) {
    }
    EXPECT_EQ(daemon.Finish().error_code(), grpc::RESOURCE_EXHAUSTED);
  });
}

TEST_F(RpcLimitsTest, ClientsThatNeverRead_HoldUpNobody) {
  SubmitBeside([&] {
    const auto stub = v1::JobService::NewStub(coordinator_->Channel());
    std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
    std::vector<std::unique_ptr<grpc::ClientReader<v1::Event>>> streams;
    for (int i = 0; i < 1000; ++i) {
      contexts.push_back(Context());
      streams.push_back(stub->WatchEvents(contexts.back().get(), v1::WatchEventsRequest()));
    }
    // A reader that does read gets every event meanwhile.
    for (int i = 0; i < 50; ++i) MustSubmit(absl::StrCat("mine-", i));
    const auto context = Context();
    const auto reader = stub_->WatchEvents(context.get(), v1::WatchEventsRequest());
    v1::Event event;
    do {
      ASSERT_TRUE(reader->Read(&event));
    } while (event.job_name() != "mine-49");
    context->TryCancel();
    for (const auto& each : contexts) each->TryCancel();
  });
}

// The memory of this process, which has the coordinator and its clients.
int64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages >> pages;
  return pages * ::sysconf(_SC_PAGESIZE);
}

// Counts the streams that were cut off.
class SlowReaders : public metrics::Registry {
 public:
  metrics::Counter& GetCounter(const metrics::Family& family,
                               const std::vector<std::string>& labels) override {
    const bool slow = labels.size() == 2 && labels[1] == "SLOW_READER";
    return slow ? dropped_ : rest_->GetCounter(family, labels);
  }
  metrics::Gauge& GetGauge(const metrics::Family& family,
                           const std::vector<std::string>& labels) override {
    return rest_->GetGauge(family, labels);
  }
  metrics::Histogram& GetHistogram(const metrics::Family& family,
                                   const std::vector<std::string>& labels) override {
    return rest_->GetHistogram(family, labels);
  }
  void Remove(const metrics::Family&, const std::vector<std::string>&) override {}

  // False: it took longer than a minute.
  bool WaitFor(int count) {
    MutexLock lock(&dropped_.mutex);
    auto enough = [this, count]() ABSL_SHARED_LOCKS_REQUIRED(dropped_.mutex) {
      return dropped_.count >= count;
    };
    return dropped_.mutex.AwaitWithTimeout(Condition(&enough), absl::Minutes(1));
  }

 private:
  struct Dropped : metrics::Counter {
    void Increment(double) override {
      MutexLock lock(&mutex);
      ++count;
    }
    Mutex mutex;
    int count ABSL_GUARDED_BY(mutex) = 0;
  };
  Dropped dropped_;
  const std::unique_ptr<metrics::Registry> rest_ = metrics::DiscardRegistry();
};

TEST_F(RpcLimitsTest, ReaderThatTakesNothing_IsDropped_AndCostsLittleMemoryUntilThen) {
  const std::string directory = directory_ + "/slow";
  std::filesystem::create_directory(directory);
  auto registry = std::make_unique<SlowReaders>();
  SlowReaders& slow = *registry;
  Coordinator coordinator(directory, absl::Seconds(5), kHelloTimeout, {},
                          {.recheck = absl::Milliseconds(500)}, std::move(registry));
  const auto submit = [stub = v1::JobService::NewStub(coordinator.Channel())](int first,
                                                                              int count) {
    for (int i = first; i < first + count; ++i) {
      v1::SubmitRequest request;
      *request.mutable_spec() = testing::SmallJobSpec(absl::StrCat("job-", i));
      v1::SubmitResponse response;
      const grpc::Status status = stub->Submit(Context().get(), request, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
    }
  };
  // A window as small as can be, so that little is on the way.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 1024);
  const auto stub = v1::JobService::NewStub(grpc::CreateCustomChannel(
      coordinator.address(), grpc::InsecureChannelCredentials(), arguments));
  constexpr int kReaders = 300;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::Event>>> streams;
  submit(0, 1);
  v1::Event event;
  for (int i = 0; i < kReaders; ++i) {
    contexts.push_back(Context());
    streams.push_back(stub->WatchEvents(contexts.back().get(), v1::WatchEventsRequest()));
    ASSERT_TRUE(streams.back()->Read(&event));
  }
  const int64_t before = ResidentBytes();
  constexpr int kJobs = 1500;
  submit(1, kJobs);
  [[maybe_unused]] const int64_t grown = ResidentBytes() - before;
  // A reader that reads misses nothing, and is not dropped.
  const auto reading = Context();
  const auto reader = v1::JobService::NewStub(coordinator.Channel())
                          ->WatchEvents(reading.get(), v1::WatchEventsRequest());
  int events = 0;
  do {
    ASSERT_TRUE(reader->Read(&event));
    ++events;
  } while (event.job_name() != absl::StrCat("job-", kJobs));
  EXPECT_GE(events, kJobs);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  // If every event waited for every reader, they alone would take 60 MB and more.
  EXPECT_LT(grown, int64_t{60} << 20);
#endif
  RecordProperty("grown_bytes", std::to_string(grown));
  // Those that do not are cut off: what was on its way to them is all that they get.
  ASSERT_TRUE(slow.WaitFor(kReaders));
  for (size_t i = 0; i < streams.size(); ++i) {
    int got = 0;
    while (streams[i]->Read(&event)) ++got;
    EXPECT_LT(got, kJobs);
    EXPECT_EQ(streams[i]->Finish().error_code(), grpc::CANCELLED);
  }
  submit(kJobs + 1, 1);
  do {
    ASSERT_TRUE(reader->Read(&event));
  } while (event.job_name() != absl::StrCat("job-", kJobs + 1));
  reading->TryCancel();
}

TEST_F(RpcLimitsTest, StreamWithoutHello_IsClosedAfterItsTime) {
  std::string name = (std::filesystem::temp_directory_path() / "muster-rpc-XXXXXX").string();
  const std::string directory = mkdtemp(name.data());
  {
    const Coordinator coordinator(directory, absl::Seconds(5), absl::Milliseconds(300));
    const auto stub = v1::WorkerService::NewStub(coordinator.Channel());
    Daemon daemon(coordinator, "w0", 1);
    daemon.ReadUntil([](const auto& m) { return m.has_welcome(); });
    const auto context = Context();
    const auto stream = stub->Session(context.get());
    v1::FromCoordinator message;
    EXPECT_FALSE(stream->Read(&message));
    const grpc::Status status = stream->Finish();
    EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
    EXPECT_THAT(status.error_message(), HasSubstr("no hello within 300ms"));
    // The session that said Hello before stays open.
    v1::FromWorker heartbeat;
    heartbeat.mutable_observed();
    EXPECT_TRUE(daemon.Write(heartbeat));
    daemon.Cancel();
    EXPECT_EQ(daemon.Finish().error_code(), grpc::CANCELLED);
  }
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace muster::coordinator
