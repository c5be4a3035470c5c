#include "kernels/device/device.h"
#include "base/mutex.h"

#include <atomic>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels/memory/memory.h"
#include "tests/kernels/support.h"
#include "tests/support/status_matchers.h"

namespace muster::kernels {
namespace {

using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::Host;

TEST(HostDevice, Allocate_AnySize_IsAlignedAndWritable) {
  Host host(1);
  for (int64_t bytes : {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{5} << 20}) {
    ASSERT_OK_AND_ASSIGN(std::unique_ptr<Buffer> buffer, host.device->Allocate(bytes));
    EXPECT_EQ(buffer->bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(buffer->data()) % 256, 0u);
    std::memset(buffer->data(), 1, bytes);
  }
}

TEST(HostDevice, Allocate_MoreThanThereIs_IsResourceExhaustedWithBothSizes) {
  Host host(1);
  EXPECT_THAT(host.device->Allocate(int64_t{1} << 50),
              StatusIs(absl::StatusCode::kResourceExhausted,
                       ::testing::AllOf(HasSubstr("1125899906842624"), HasSubstr("available"))));
}

TEST(HostDevice, MakeCudaDevice_BuildOrMachineWithoutCuda_SaysSo) {
  absl::StatusOr<std::unique_ptr<Device>> device = MakeCudaDevice(0);
  if (device.ok()) GTEST_SKIP() << "there is a " << (*device)->name();
  EXPECT_THAT(device.status().code(),
              ::testing::AnyOf(absl::StatusCode::kUnimplemented, absl::StatusCode::kUnavailable,
                               absl::StatusCode::kFailedPrecondition));
}

TEST(EagerStream, Enqueue_RunsInsideTheCall) {
  Host host(1);
  bool ran = false;
  host.stream->Enqueue([&] { ran = std::this_thread::get_id() != std::thread::id(); });
  EXPECT_TRUE(ran);
}

TEST(ThreadedStream, Enqueue_ReturnsBeforeTheWorkEnds_AndKeepsOrder) {
  Host host(1, {.threaded = true});
  Notification go;
  std::vector<int> order;
  host.stream->Enqueue([&] {
    go.WaitForNotification();
    order.push_back(1);
  });
  host.stream->Enqueue([&] { order.push_back(2); });
  go.Notify();  // would never be reached if Enqueue ran the work
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST(ThreadedStream, Destructor_FinishesWhatWasEnqueued) {
  std::atomic<int> ran{0};
  {
    Host host(1, {.threaded = true});
    for (int i = 0; i < 10; ++i) host.stream->Enqueue([&] { ++ran; });
  }
  EXPECT_EQ(ran, 10);
}

TEST(ThreadedStream, Wait_ForEventOfOtherStream_RunsAfterIt) {
  Host host(1, {.threaded = true});
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Stream> other, host.device->MakeStream({.threaded = true}));
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Event> event, host.device->MakeEvent());
  Notification go;
  std::vector<int> order;
  host.stream->Enqueue([&] {
    go.WaitForNotification();
    order.push_back(1);
  });
  host.stream->Record(*event);
  other->Wait(*event);
  other->Enqueue([&] { order.push_back(2); });
  go.Notify();
  ASSERT_OK(other->Synchronize());
  EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST(ThreadedStream, Record_Again_IsWaitedForAnew) {
  Host host(1, {.threaded = true});
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Event> event, host.device->MakeEvent());
  int value = 0;
  for (int i = 1; i <= 3; ++i) {
    host.stream->Enqueue([&, i] { value = i; });
    host.stream->Record(*event);
    event->Synchronize();
    EXPECT_EQ(value, i);
  }
}

TEST(ThreadedStream, Wait_EventRecordedLaterAgain_WaitsForTheEarlierRecordOnly) {
  Host host(1, {.threaded = true});
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Stream> other, host.device->MakeStream({.threaded = true}));
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Event> event, host.device->MakeEvent());
  Notification go;
  host.stream->Record(*event);
  other->Wait(*event);
  host.stream->Enqueue([&] { go.WaitForNotification(); });
  host.stream->Record(*event);
  ASSERT_OK(other->Synchronize());  // hangs if it waited for the second record
  go.Notify();
  ASSERT_OK(host.stream->Synchronize());  // it looks at `go` until then
}

TEST(Event, SecondsSince_RecordedInOrder_IsNotNegative) {
  Host host(1);
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Event> begin, host.device->MakeEvent(true));
  ASSERT_OK_AND_ASSIGN(std::unique_ptr<Event> end, host.device->MakeEvent(true));
  host.stream->Record(*begin);
  host.stream->Record(*end);
  EXPECT_GE(end->SecondsSince(*begin), 0);
}

TEST(Stream, Fail_Twice_SynchronizeReturnsTheFirstOnce) {
  for (bool threaded : {false, true}) {
    Host host(1, {.threaded = threaded});
    host.stream->Enqueue([&] { host.stream->Fail(absl::AbortedError("first")); });
    host.stream->Enqueue([&] { host.stream->Fail(absl::AbortedError("second")); });
    EXPECT_THAT(host.stream->Synchronize(),
                StatusIs(absl::StatusCode::kAborted, HasSubstr("first")));
    EXPECT_OK(host.stream->Synchronize());
    EXPECT_OK(host.stream->status());
  }
}

TEST(ThreadedStream, Ops_RunInOrderWithEnqueuedWork) {
  Host host(2, {.threaded = true});
  testing::Floats x(100000, 1.0f), y(100000, 2.0f);
  float seen = 0;
  Axpy(*host.stream, 3, testing::View(x, {100000}), testing::View(y, {100000}));
  host.stream->Enqueue([&] { seen = y[99999]; });
  ASSERT_OK(host.stream->Synchronize());
  EXPECT_EQ(seen, 5);
}

}  // namespace
}  // namespace muster::kernels
