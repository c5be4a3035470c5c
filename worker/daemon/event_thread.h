// A thread that runs posted work, timers, and handlers of file descriptors, one at a time.
#ifndef MUSTER_WORKER_DAEMON_EVENT_THREAD_H_
#define MUSTER_WORKER_DAEMON_EVENT_THREAD_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/ids.h"
#include "base/mutex.h"
#include "worker/daemon/proc.h"

namespace muster::worker {

using WatchId = StrongId<struct WatchIdTag, uint64_t>;

class EventThread {
 public:
  // `busy` is asked on the thread after each turn, for AwaitIdle.
  EventThread(const Clock& clock, std::function<bool()> busy);
  // Runs what has been posted, then stops; timers and watches end with it.
  ~EventThread();

  // From any thread: runs `work` on the thread, in order.
  void Post(absl::AnyInvocable<void()> work) ABSL_LOCKS_EXCLUDED(mutex_);
  // From any thread but this one: waits until nothing is posted and `busy` was false after the last
  // turn. False: it took longer than `timeout`.
  bool AwaitIdle(absl::Duration timeout) ABSL_LOCKS_EXCLUDED(mutex_);

  // ---- on the thread only
  void After(absl::Duration delay, absl::AnyInvocable<void()> work);
  // Runs `ready` whenever `fd` can be read, until Unwatch. `fd` stays the caller's, who calls
  // Unwatch before closing it. Ids are never reused.
  WatchId Watch(int fd, std::function<void()> ready);
  // Safe to call from the handler itself, and for a watch that has ended.
  void Unwatch(WatchId watch);

 private:
  struct Watched {
    int fd = -1;
    std::function<void()> ready;
  };
  void Run();
  void RunReady(WatchId watch);
  void RunPosted() ABSL_LOCKS_EXCLUDED(mutex_);
  void RunTimers();
  void AddToEpoll(int fd, uint64_t data);

  const Clock& clock_;
  const std::function<bool()> busy_;
  const UniqueFd epoll_;
  const UniqueFd wake_;  // an eventfd: something has been posted

  Mutex mutex_;
  std::deque<absl::AnyInvocable<void()>> posted_ ABSL_GUARDED_BY(mutex_);
  bool was_busy_ ABSL_GUARDED_BY(mutex_) = false;

  // On the thread only.
  bool stopping_ = false;
  uint64_t next_watch_ = 1;
  std::map<WatchId, Watched> watches_;
  std::multimap<absl::Duration, absl::AnyInvocable<void()>> timers_;  // by Clock::Monotonic
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_EVENT_THREAD_H_
