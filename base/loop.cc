#include "base/loop.h"

#include <utility>

#include "base/check.h"

namespace muster {

ThreadLoop::ThreadLoop(const Clock& clock) : clock_(clock), thread_([this] { Run(); }) {}

ThreadLoop::~ThreadLoop() { Stop(); }

void ThreadLoop::Post(absl::AnyInvocable<void()> work) {
  MutexLock lock(&mutex_);
  if (!stopping_) ready_.push_back(std::move(work));
}

void ThreadLoop::PostAfter(absl::Duration delay, absl::AnyInvocable<void()> work) {
  const absl::Duration due = clock_.Monotonic() + delay;
  MutexLock lock(&mutex_);
  if (!stopping_) timers_.emplace(std::make_pair(due, next_order_++), std::move(work));
}

void ThreadLoop::Stop() {
  CHECK(!OnLoop()) << "a loop cannot join itself";
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void ThreadLoop::Run() {
  while (true) {
    absl::AnyInvocable<void()> work;
    {
      MutexLock lock(&mutex_);
      auto wake = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
        return stopping_ || !ready_.empty() ||
               (!timers_.empty() && timers_.begin()->first.first <= clock_.Monotonic());
      };
      if (timers_.empty()) {
        // The first timer must wake the loop, which then waits with a timeout.
        auto changed = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          return stopping_ || !ready_.empty() || !timers_.empty();
        };
        mutex_.Await(Condition(&changed));
      } else {
        const auto first = timers_.begin()->first;
        auto changed = [&]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
          return wake() || timers_.begin()->first < first;
        };
        mutex_.AwaitWithTimeout(Condition(&changed), first.first - clock_.Monotonic());
      }
      if (stopping_) return;
      while (!timers_.empty() && timers_.begin()->first.first <= clock_.Monotonic()) {
        ready_.push_back(std::move(timers_.begin()->second));
        timers_.erase(timers_.begin());
      }
      if (ready_.empty()) continue;
      work = std::move(ready_.front());
      ready_.pop_front();
    }
    std::move(work)();
  }
}

}  // namespace muster
