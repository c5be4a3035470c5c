#ifndef MUSTER_BASE_MUTEX_H_
#define MUSTER_BASE_MUTEX_H_

#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

// The locks of the tree: Abseil's, under names of our own. Distributions build Abseil's library
// without ThreadSanitizer, which therefore does not see its locks and takes everything that they
// guard for a race. A build with MUSTER_SANITIZE=thread gets the same interface over std::mutex
// instead. It is slower and means the same: a condition is evaluated with the mutex held, whenever
// the mutex was released.

#if defined(__SANITIZE_THREAD__)
#define MUSTER_THREAD_SANITIZER 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define MUSTER_THREAD_SANITIZER 1
#endif
#endif

namespace muster {

// Abseil's own check of the order of locks is on in Debian's library and costs a busy program a
// tenth of its time. Sanitized builds keep it.
inline void SkipLockOrderCheck() {
#if defined(NDEBUG) && !defined(__SANITIZE_ADDRESS__)
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
}

using Condition = absl::Condition;

#if !defined(MUSTER_THREAD_SANITIZER)

using Mutex = absl::Mutex;
using MutexLock = absl::MutexLock;
using Notification = absl::Notification;

#else

class ABSL_LOCKABLE Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }

  // Wakes waiters before it releases the mutex: the next owner may destroy it.
  void Unlock() ABSL_UNLOCK_FUNCTION() {
    changed_.notify_all();
    mutex_.unlock();
  }

  void AssertHeld() const ABSL_ASSERT_EXCLUSIVE_LOCK() {}

  void Await(const Condition& condition) { AwaitWithTimeout(condition, absl::InfiniteDuration()); }

  // True when `condition` holds at the return. The mutex is held either way.
  bool AwaitWithTimeout(const Condition& condition, absl::Duration timeout) {
    if (condition.Eval()) return true;
    changed_.notify_all();  // others may wait for what the caller has changed
    std::unique_lock<std::mutex> lock(mutex_, std::adopt_lock);
    const auto holds = [&condition] { return condition.Eval(); };
    bool held = true;
    if (timeout >= kForever) {
      changed_.wait(lock, holds);
    } else {
      held = changed_.wait_for(lock, absl::ToChronoNanoseconds(timeout), holds);
    }
    lock.release();
    return held;
  }

  bool AwaitWithDeadline(const Condition& condition, absl::Time deadline) {
    return AwaitWithTimeout(condition, deadline - absl::Now());
  }

 private:
  // Longer timeouts would overflow the standard library's clocks.
  static constexpr absl::Duration kForever = absl::Hours(24 * 365);

  std::mutex mutex_;
  std::condition_variable changed_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(*mutex) {
    mutex_.Lock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_.Unlock(); }

 private:
  Mutex& mutex_;
};

class Notification {
 public:
  void Notify() {
    MutexLock lock(&mutex_);
    notified_ = true;
  }

  bool HasBeenNotified() const {
    MutexLock lock(&mutex_);
    return notified_;
  }

  void WaitForNotification() const {
    MutexLock lock(&mutex_);
    mutex_.Await(Condition(&notified_));
  }

  bool WaitForNotificationWithTimeout(absl::Duration timeout) const {
    MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(Condition(&notified_), timeout);
  }

 private:
  mutable Mutex mutex_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

#endif

}  // namespace muster

#endif  // MUSTER_BASE_MUTEX_H_
