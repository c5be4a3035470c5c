#include "base/loop.h"

#include <vector>

#include "base/mutex.h"
#include "tests/support/status_matchers.h"

namespace muster {
namespace {

TEST(ThreadLoop, PostedWork_RunsInOrderOnTheLoop) {
  RealClock clock;
  ThreadLoop loop(clock);
  std::vector<int> order;
  Notification done;
  for (int i = 0; i < 100; ++i) {
    loop.Post([&, i] {
      EXPECT_TRUE(loop.OnLoop());
      order.push_back(i);
    });
  }
  loop.Post([&] { done.Notify(); });
  done.WaitForNotification();
  ASSERT_EQ(order.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order[i], i);
  EXPECT_FALSE(loop.OnLoop());
}

TEST(ThreadLoop, Timers_RunInOrderOfDeadlines) {
  RealClock clock;
  ThreadLoop loop(clock);
  std::vector<int> order;
  Notification done;
  loop.Post([&] {
    loop.PostAfter(absl::Milliseconds(20), [&] {
      order.push_back(2);
      done.Notify();
    });
    loop.PostAfter(absl::Milliseconds(1), [&] { order.push_back(1); });
  });
  done.WaitForNotification();
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(ThreadLoop, Stop_DropsWaitingTimersAndJoins) {
  RealClock clock;
  bool ran = false;
  {
    ThreadLoop loop(clock);
    loop.PostAfter(absl::Hours(1), [&] { ran = true; });
  }
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace muster
