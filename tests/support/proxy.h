#ifndef MUSTER_TESTS_SUPPORT_PROXY_H_
#define MUSTER_TESTS_SUPPORT_PROXY_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"

namespace muster::testing {

// A TCP proxy on loopback in front of HOST:PORT whose connections can become half-open. Freeze
// keeps all existing connections open and forwards nothing on them, like a stopped process or a
// firewall that has forgotten them. Bytes are still acknowledged, so that an end notices only if it
// waits for an answer. Connections made later work. Runs a thread of its own. Thread-safe.
class Proxy {
 public:
  explicit Proxy(const std::string& upstream) {
    const size_t colon = upstream.rfind(':');
    upstream_.sin_family = AF_INET;
    int port = 0;
    CHECK(absl::SimpleAtoi(upstream.substr(colon + 1), &port)) << upstream;
    upstream_.sin_port = htons(static_cast<uint16_t>(port));
    CHECK_EQ(::inet_pton(AF_INET, upstream.substr(0, colon).c_str(), &upstream_.sin_addr), 1);
    listener_ = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in here = {};
    here.sin_family = AF_INET;
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(here);
    CHECK_EQ(::bind(listener_, reinterpret_cast<sockaddr*>(&here), size), 0);
    CHECK_EQ(::listen(listener_, 16), 0);
    CHECK_EQ(::getsockname(listener_, reinterpret_cast<sockaddr*>(&here), &size), 0);
    address_ = absl::StrCat("127.0.0.1:", ntohs(here.sin_port));
    wake_ = ::eventfd(0, EFD_CLOEXEC);
    thread_ = std::thread([this] { Run(); });
  }
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;
  ~Proxy() {
    Tell(&stopping_);
    thread_.join();
    for (const Link& link : links_) {
      ::close(link.client);
      ::close(link.server);
    }
    ::close(listener_);
    ::close(wake_);
  }

  const std::string& address() const { return address_; }
  void Freeze() {
    Tell(&freezing_);
    MutexLock lock(&mutex_);
    mutex_.Await(Condition(&frozen_));
  }
  // True when, within `patience`, the client or the server closed its end of a frozen connection.
  bool AwaitClientGone(absl::Duration patience) { return AwaitGone(&client_gone_, patience); }
  bool AwaitServerGone(absl::Duration patience) { return AwaitGone(&server_gone_, patience); }

 private:
  struct Link {
    int client = -1;
    int server = -1;
    bool frozen = false;
    bool ended = false;
  };

  void Tell(bool* what) {
    MutexLock lock(&mutex_);
    *what = true;
    const uint64_t one = 1;
    CHECK_EQ(::write(wake_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }
  bool AwaitGone(bool* side, absl::Duration patience) {
    MutexLock lock(&mutex_);
    return mutex_.AwaitWithTimeout(Condition(side), patience);
  }

  void Run() {
    while (true) {
      std::vector<pollfd> polls = {{wake_, POLLIN, 0}, {listener_, POLLIN, 0}};
      for (const Link& link : links_) {
        // Of a frozen link only the end is polled; its bytes are left unread.
        const int16_t events = link.ended ? 0 : link.frozen ? POLLRDHUP : POLLIN;
        polls.push_back({link.ended ? -1 : link.client, events, 0});
        polls.push_back({link.ended ? -1 : link.server, events, 0});
      }
      CHECK(::poll(polls.data(), polls.size(), -1) >= 0);
      if (polls[0].revents != 0) {
        if (!Obey()) return;
        continue;  // polls again: links that are frozen now must not be read
      }
      for (size_t i = 0; 2 * i + 3 < polls.size(); ++i) {
        Link& link = links_[i];
        if (polls[2 * i + 2].revents != 0) Move(link, link.client, link.server, &client_gone_);
        if (polls[2 * i + 3].revents != 0) Move(link, link.server, link.client, &server_gone_);
      }
      if (polls[1].revents != 0) Accept();
    }
  }

  bool Obey() {
    uint64_t ignored = 0;
    CHECK_EQ(::read(wake_, &ignored, sizeof(ignored)), static_cast<ssize_t>(sizeof(ignored)));
    MutexLock lock(&mutex_);
    if (freezing_ && !frozen_) {
      for (Link& link : links_) link.frozen = true;
      frozen_ = true;
    }
    return !stopping_;
  }

  void Accept() {
    Link link;
    link.client = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
    link.server = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (::connect(link.server, reinterpret_cast<sockaddr*>(&upstream_), sizeof(upstream_)) != 0) {
      ::close(link.client);
      ::close(link.server);
      return;
    }
    links_.push_back(link);
  }

  void Move(Link& link, int from, int to, bool* gone) {
    if (link.ended) return;
    if (link.frozen) {
      link.ended = true;
      MutexLock lock(&mutex_);
      *gone = true;
      return;
    }
    char bytes[16384];
    const ssize_t count = ::recv(from, bytes, sizeof(bytes), 0);
    if (count > 0 && ::send(to, bytes, static_cast<size_t>(count), MSG_NOSIGNAL) == count) return;
    link.ended = true;
    ::shutdown(link.client, SHUT_RDWR);
    ::shutdown(link.server, SHUT_RDWR);
  }

  sockaddr_in upstream_ = {};
  std::string address_;
  int listener_ = -1;
  int wake_ = -1;
  std::vector<Link> links_;  // used by the thread only
  Mutex mutex_;
  bool freezing_ ABSL_GUARDED_BY(mutex_) = false;
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  bool client_gone_ ABSL_GUARDED_BY(mutex_) = false;
  bool server_gone_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_PROXY_H_
