// TCP sockets as the mesh of ranks needs them: numeric addresses (no name is ever looked up),
// non-blocking, closed on exec, without Nagle's delay.
#ifndef MUSTER_PARALLEL_COMM_TCP_SOCKET_H_
#define MUSTER_PARALLEL_COMM_TCP_SOCKET_H_

#include <sys/socket.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/network.h"

namespace muster::parallel {

// Owns a file descriptor.
class Socket {
 public:
  Socket() = default;
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Socket& operator=(Socket&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Socket();

  int fd() const { return fd_; }

 private:
  int fd_ = -1;
};

// A numeric IP address and a port.
class SocketAddress {
 public:
  SocketAddress() = default;
  // "10.0.0.1", "fd00::1" or "fe80::1%eth0"; no brackets. kInvalidArgument.
  static absl::StatusOr<SocketAddress> Parse(const std::string& address, int port);
  // An empty address where the socket has none.
  static SocketAddress OfPeer(const Socket& socket);   // the remote end
  static SocketAddress OfLocal(const Socket& socket);  // this end

  int family() const { return storage_.ss_family; }
  int port() const;
  std::string address() const;   // without port and brackets
  std::string ToString() const;  // "10.0.0.1:20000", "[fd00::1]:20000"

  const sockaddr* data() const { return reinterpret_cast<const sockaddr*>(&storage_); }
  socklen_t size() const { return size_; }

 private:
  // getpeername or getsockname.
  using NameOfSocket = int (*)(int fd, sockaddr* address, socklen_t* size);
  static SocketAddress Of(const Socket& socket, NameOfSocket name_of);

  sockaddr_storage storage_ = {};
  socklen_t size_ = 0;
};

// Listens on the first free port of the range, beginning with its `offset`-th and wrapping around,
// so that the ranks of a host do not all try the same one. kInvalidArgument: no interface of this
// host has the address. kResourceExhausted: every port is in use.
absl::StatusOr<Socket> Listen(const std::string& address, const PortRange& ports, int offset);

// Begins to connect from `local` (a numeric address; the port is the system's choice), which keeps
// traffic on the interface that was chosen. The socket becomes writable when the attempt has ended;
// ConnectError then says how. An errno that is known at once is returned as a status with
// FailureText's message.
absl::StatusOr<Socket> Dial(const std::string& local, const SocketAddress& to);
// 0: connected; else the errno.
int ConnectError(const Socket& socket);
// The errno of a connection for people: "connection refused", ...
std::string FailureText(int error);

// Name of the interface of this host that has the address ("eth0"). kNotFound.
absl::StatusOr<std::string> InterfaceOf(const std::string& address);

// Accepts a connection, or an empty socket (fd -1) when none is waiting.
Socket Accept(const Socket& listener);

// How long ago the peer's machine last acknowledged or sent anything. InfiniteDuration where the
// system does not say.
absl::Duration SinceHeard(const Socket& socket);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TCP_SOCKET_H_
