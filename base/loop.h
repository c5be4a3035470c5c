// One thread that runs posted work in order, for code that is single-threaded.
#ifndef MUSTER_BASE_LOOP_H_
#define MUSTER_BASE_LOOP_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace muster {

// Post and PostAfter may be called from any thread. Work posted from one thread runs in that order.
class Loop {
 public:
  virtual ~Loop() = default;
  virtual void Post(absl::AnyInvocable<void()> work) = 0;
  // Runs `work` once `delay` has passed on the loop's monotonic clock; never earlier.
  virtual void PostAfter(absl::Duration delay, absl::AnyInvocable<void()> work) = 0;
  virtual bool OnLoop() const = 0;
};

// A loop with its own thread. Stop() (or the destructor) drops work that has not started.
class ThreadLoop : public Loop {
 public:
  explicit ThreadLoop(const Clock& clock);
  ~ThreadLoop() override;
  void Post(absl::AnyInvocable<void()> work) override;
  void PostAfter(absl::Duration delay, absl::AnyInvocable<void()> work) override;
  bool OnLoop() const override { return std::this_thread::get_id() == thread_.get_id(); }
  // Joins the thread; must not be called on the loop. Safe to call twice.
  void Stop();

 private:
  void Run();

  const Clock& clock_;
  Mutex mutex_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<absl::AnyInvocable<void()>> ready_ ABSL_GUARDED_BY(mutex_);
  // Keyed by (due, order of posting) so that equal deadlines keep their order.
  std::map<std::pair<absl::Duration, uint64_t>, absl::AnyInvocable<void()>> timers_
      ABSL_GUARDED_BY(mutex_);
  uint64_t next_order_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster

#endif  // MUSTER_BASE_LOOP_H_
