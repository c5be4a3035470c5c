#include "worker/daemon/event_thread.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace muster::worker {
namespace {

constexpr int kEventsAtOnce = 64;
constexpr uint64_t kWake = 0;  // no watch's id

}  // namespace

EventThread::EventThread(const Clock& clock, std::function<bool()> busy)
    : clock_(clock),
      busy_(std::move(busy)),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  CHECK(epoll_.valid() && wake_.valid()) << std::strerror(errno);
  AddToEpoll(wake_.get(), kWake);
  thread_ = std::thread([this] { Run(); });
}

EventThread::~EventThread() {
  Post([this] { stopping_ = true; });
  thread_.join();
}

void EventThread::Post(absl::AnyInvocable<void()> work) {
  {
    MutexLock lock(&mutex_);
    posted_.push_back(std::move(work));
  }
  const uint64_t one = 1;
  (void)!::write(wake_.get(), &one, sizeof(one));
}

bool EventThread::AwaitIdle(absl::Duration timeout) {
  const auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return posted_.empty() && !was_busy_;
  };
  MutexLock lock(&mutex_);
  return mutex_.AwaitWithTimeout(Condition(&idle), timeout);
}

void EventThread::After(absl::Duration delay, absl::AnyInvocable<void()> work) {
  timers_.emplace(clock_.Monotonic() + delay, std::move(work));
}

WatchId EventThread::Watch(int fd, std::function<void()> ready) {
  const WatchId watch(next_watch_++);
  watches_[watch] = {fd, std::move(ready)};
  AddToEpoll(fd, watch.value());
  return watch;
}

void EventThread::Unwatch(WatchId watch) {
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, found->second.fd, nullptr);
  watches_.erase(found);
}

void EventThread::AddToEpoll(int fd, uint64_t data) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.u64 = data;
  CHECK_EQ(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event), 0) << std::strerror(errno);
}

void EventThread::Run() {
  while (!stopping_) {
    int timeout_ms = -1;
    if (!timers_.empty()) {
      const absl::Duration wait = timers_.begin()->first - clock_.Monotonic();
      timeout_ms = static_cast<int>(
          std::max<int64_t>(0, absl::ToInt64Milliseconds(wait + absl::Microseconds(999))));
    }
    epoll_event events[kEventsAtOnce];
    const int count = ::epoll_wait(epoll_.get(), events, kEventsAtOnce, timeout_ms);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 != kWake) RunReady(WatchId(events[i].data.u64));
    }
    RunPosted();
    RunTimers();
    const bool busy = busy_();
    MutexLock lock(&mutex_);
    was_busy_ = busy;
  }
}

void EventThread::RunReady(WatchId watch) {
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;  // ended earlier in this turn
  // A copy, since the handler may end its own watch.
  const std::function<void()> ready = found->second.ready;
  ready();
}

void EventThread::RunPosted() {
  uint64_t ignored;
  (void)!::read(wake_.get(), &ignored, sizeof(ignored));
  std::deque<absl::AnyInvocable<void()>> posted;
  {
    MutexLock lock(&mutex_);
    posted.swap(posted_);
    // Until the end of this turn nobody can tell.
    was_busy_ = was_busy_ || !posted.empty();
  }
  for (auto& work : posted) work();
}

void EventThread::RunTimers() {
  while (!timers_.empty() && timers_.begin()->first <= clock_.Monotonic()) {
    absl::AnyInvocable<void()> due = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    due();
  }
}

}  // namespace muster::worker
