#include "parallel/comm/tcp_poller.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace muster::parallel {
namespace {

constexpr int kEventsMax = 64;

}  // namespace

absl::Status TcpPoller::Open() {
  epoll_ = Socket(epoll_create1(EPOLL_CLOEXEC));
  wake_ = Socket(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (epoll_.fd() < 0 || wake_.fd() < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("epoll: ", std::strerror(errno)));
  }
  Add(wake_.fd(), kWakeId, EPOLLIN);
  return absl::OkStatus();
}

void TcpPoller::Control(int operation, int fd, uint64_t id, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.u64 = id;
  (void)epoll_ctl(epoll_.fd(), operation, fd, &event);
}

void TcpPoller::Wake() {
  const uint64_t one = 1;
  (void)!write(wake_.fd(), &one, sizeof(one));
}

void TcpPoller::Awoken() {
  uint64_t count = 0;
  (void)!read(wake_.fd(), &count, sizeof(count));
}

std::vector<epoll_event> TcpPoller::Wait(absl::Duration timeout) {
  std::vector<epoll_event> events(kEventsMax);
  const int count = epoll_wait(epoll_.fd(), events.data(), kEventsMax,
                               static_cast<int>(absl::ToInt64Milliseconds(timeout)));
  events.resize(static_cast<size_t>(std::max(count, 0)));
  return events;
}

}  // namespace muster::parallel
