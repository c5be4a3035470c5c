#include "worker/rank/failure_deadline.h"

#include <gtest/gtest.h>

#include <string>

#include "base/mutex.h"

namespace muster::worker {
namespace {

TEST(FailureDeadline, ArmedAndNotDisarmed_ExpiresOnceWithTheFirstReason) {
  Notification expired;
  int times = 0;
  std::string reason;
  FailureDeadline deadline(absl::Milliseconds(1), [&](const absl::Status& why) {
    ++times;
    reason = std::string(why.message());
    expired.Notify();
  });
  deadline.Arm(absl::UnavailableError("a peer is gone"));
  deadline.Arm(absl::AbortedError("aborted"));
  expired.WaitForNotification();
  deadline.Disarm();
  EXPECT_EQ(times, 1);
  EXPECT_EQ(reason, "a peer is gone");
}

TEST(FailureDeadline, DisarmedInTime_NeverExpires) {
  bool expired = false;
  {
    FailureDeadline deadline(absl::InfiniteDuration(),
                             [&](const absl::Status&) { expired = true; });
    deadline.Arm(absl::UnavailableError("a peer is gone"));
    deadline.Disarm();
    deadline.Arm(absl::UnavailableError("another"));
  }
  EXPECT_FALSE(expired);
}

TEST(FailureDeadline, NeverArmed_EndsWithItsOwner) {
  FailureDeadline deadline(absl::ZeroDuration(), [](const absl::Status&) { FAIL(); });
}

}  // namespace
}  // namespace muster::worker
