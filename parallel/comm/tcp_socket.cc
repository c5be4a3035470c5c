#include "parallel/comm/tcp_socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"

namespace muster::parallel {
namespace {

constexpr int kBacklog = 1024;

void SetOption(int fd, int level, int option, int value) {
  // Every option set here only improves the socket; one that an old kernel lacks is left out.
  (void)setsockopt(fd, level, option, &value, sizeof(value));
}

}  // namespace

Socket::~Socket() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<SocketAddress> SocketAddress::Parse(const std::string& address, int port) {
  addrinfo hints = {};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(address.c_str(), absl::StrCat(port).c_str(), &hints, &found);
  if (error != 0 || found == nullptr || address.empty()) {
    if (error == 0) freeaddrinfo(found);
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is no numeric IP address"));
  }
  SocketAddress result;
  std::memcpy(&result.storage_, found->ai_addr, found->ai_addrlen);
  result.size_ = found->ai_addrlen;
  freeaddrinfo(found);
  return result;
}

SocketAddress SocketAddress::Of(const Socket& socket, NameOfSocket name_of) {
  SocketAddress result;
  result.size_ = sizeof(result.storage_);
  if (name_of(socket.fd(), reinterpret_cast<sockaddr*>(&result.storage_), &result.size_) != 0) {
    return {};
  }
  return result;
}

SocketAddress SocketAddress::OfPeer(const Socket& socket) { return Of(socket, getpeername); }
SocketAddress SocketAddress::OfLocal(const Socket& socket) { return Of(socket, getsockname); }

int SocketAddress::port() const {
  if (family() == AF_INET) return ntohs(reinterpret_cast<const sockaddr_in*>(&storage_)->sin_port);
  if (family() == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&storage_)->sin6_port);
  }
  return 0;
}

std::string SocketAddress::address() const {
  char host[NI_MAXHOST] = {};
  if (size_ == 0 ||
      getnameinfo(data(), size_, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) != 0) {
    return "unknown";
  }
  return host;
}

std::string SocketAddress::ToString() const {
  return HostPort{address(), absl::StrCat(port())}.ToString();
}

absl::StatusOr<Socket> Listen(const std::string& address, const PortRange& ports, int offset) {
  const int count = ports.first == 0 ? 1 : ports.last - ports.first + 1;
  for (int i = 0; i < count; ++i) {
    const int port = ports.first == 0 ? 0 : ports.first + (offset + i) % count;
    ASSIGN_OR_RETURN(const SocketAddress local, SocketAddress::Parse(address, port));
    Socket socket(::socket(local.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (socket.fd() < 0) {
      return absl::ResourceExhaustedError(absl::StrCat("a socket: ", std::strerror(errno)));
    }
    SetOption(socket.fd(), SOL_SOCKET, SO_REUSEADDR, 1);  // closed connections do not keep the port
    if (bind(socket.fd(), local.data(), local.size()) == 0 && listen(socket.fd(), kBacklog) == 0) {
      return socket;
    }
    if (errno == EADDRINUSE) continue;
    if (errno == EADDRNOTAVAIL) {
      return absl::InvalidArgumentError(
          absl::StrCat("no interface of this host has the address ", address));
    }
    return absl::InvalidArgumentError(
        absl::StrCat("cannot listen on ", local.ToString(), ": ", std::strerror(errno)));
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("every port of ", ports.ToString(), " is in use on ", address));
}

absl::StatusOr<Socket> Dial(const std::string& local, const SocketAddress& to) {
  ASSIGN_OR_RETURN(const SocketAddress from, SocketAddress::Parse(local, 0));
  if (from.family() != to.family()) {
    return absl::InvalidArgumentError(
        absl::StrCat("one address is IPv4 and the other IPv6: ", local, " and ", to.address()));
  }
  Socket socket(::socket(to.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (socket.fd() < 0) {
    return absl::ResourceExhaustedError(absl::StrCat("a socket: ", std::strerror(errno)));
  }
  SetOption(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
  SetOption(socket.fd(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1);
  if (bind(socket.fd(), from.data(), from.size()) != 0 ||
      (connect(socket.fd(), to.data(), to.size()) != 0 && errno != EINPROGRESS)) {
    return absl::UnavailableError(FailureText(errno));
  }
  return socket;
}

int ConnectError(const Socket& socket) {
  int error = 0;
  socklen_t size = sizeof(error);
  if (getsockopt(socket.fd(), SOL_SOCKET, SO_ERROR, &error, &size) != 0) return errno;
  return error;
}

std::string FailureText(int error) {
  switch (error) {
    case ECONNREFUSED:
      return "connection refused";
    case ETIMEDOUT:
      return "connection attempts time out";
    case EHOSTUNREACH:
      return "no route to host";
    case ENETUNREACH:
      return "network is unreachable";
    case EADDRNOTAVAIL:
      return "the address to connect from is not this host's";
    case ECONNRESET:
      return "connection reset";
    default:
      return std::strerror(error);
  }
}

absl::StatusOr<std::string> InterfaceOf(const std::string& address) {
  ASSIGN_OR_RETURN(const SocketAddress wanted, SocketAddress::Parse(address, 0));
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) {
    return absl::InternalError(absl::StrCat("the interfaces of this host: ", std::strerror(errno)));
  }
  std::string name;
  for (const ifaddrs* entry = list; entry != nullptr && name.empty(); entry = entry->ifa_next) {
    const sockaddr* own = entry->ifa_addr;
    if (own == nullptr || own->sa_family != wanted.family()) continue;
    const bool same =
        own->sa_family == AF_INET
            ? std::memcmp(&reinterpret_cast<const sockaddr_in*>(own)->sin_addr,
                          &reinterpret_cast<const sockaddr_in*>(wanted.data())->sin_addr,
                          sizeof(in_addr)) == 0
            : std::memcmp(&reinterpret_cast<const sockaddr_in6*>(own)->sin6_addr,
                          &reinterpret_cast<const sockaddr_in6*>(wanted.data())->sin6_addr,
                          sizeof(in6_addr)) == 0;
    if (same) name = entry->ifa_name;
  }
  freeifaddrs(list);
  if (name.empty()) {
    return absl::NotFoundError(absl::StrCat("no interface of this host has the address ", address));
  }
  return name;
}

Socket Accept(const Socket& listener) {
  Socket socket(accept4(listener.fd(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (socket.fd() >= 0) SetOption(socket.fd(), IPPROTO_TCP, TCP_NODELAY, 1);
  return socket;
}

absl::Duration SinceHeard(const Socket& socket) {
  tcp_info info = {};
  socklen_t size = sizeof(info);
  if (getsockopt(socket.fd(), IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return absl::InfiniteDuration();
  }
  return absl::Milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
}

}  // namespace muster::parallel
