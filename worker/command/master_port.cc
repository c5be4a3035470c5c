#include "worker/command/master_port.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/proc.h"

namespace muster::worker {
namespace {

constexpr int kFirst = 20000;
constexpr int kLast = 65535;

// Ports between kFirst and kLast that the kernel gives to nobody by itself.
PortRange OutsideEphemeral() {
  const std::vector<std::string> words =
      absl::StrSplit(ReadKernelFile("/proc/sys/net/ipv4/ip_local_port_range"),
                     absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  PortRange range{kFirst, kLast};
  int low = 0;
  int high = 0;
  if (words.size() < 2 || !absl::SimpleAtoi(words[0], &low) || !absl::SimpleAtoi(words[1], &high)) {
    return range;
  }
  const int below = low - kFirst;
  const int above = kLast - high;
  if (below <= 0 && above <= 0) return range;  // there are none
  return below >= above ? PortRange{kFirst, low - 1} : PortRange{high + 1, kLast};
}

// A socket that holds the name of the port; -1 when another process does.
int Hold(int port) {
  const int fd = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return -1;
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string name = absl::StrCat("muster-master-port-", port);
  std::memcpy(address.sun_path + 1, name.data(), name.size());  // the first byte 0: abstract
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(fd, reinterpret_cast<const sockaddr*>(&address), size) == 0) return fd;
  ::close(fd);
  return -1;
}

// Whether nobody has the port, on any address of either family.
bool Free(int port) {
  sockaddr_in v4 = {};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(static_cast<uint16_t>(port));
  sockaddr_in6 v6 = {};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(static_cast<uint16_t>(port));
  const auto binds = [](int family, const sockaddr* address, socklen_t size) {
    const int fd = ::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return true;  // the machine has no addresses of this family
    const int on = 1;
    if (family == AF_INET6) ::setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof(on));
    const bool bound = ::bind(fd, address, size) == 0;
    ::close(fd);
    return bound;
  };
  return binds(AF_INET, reinterpret_cast<const sockaddr*>(&v4), sizeof(v4)) &&
         binds(AF_INET6, reinterpret_cast<const sockaddr*>(&v6), sizeof(v6));
}

}  // namespace

absl::StatusOr<MasterPort> MasterPort::Choose(PortRange range, uint64_t seed) {
  if (range.first == 0) range = OutsideEphemeral();
  const int count = range.last - range.first + 1;
  const int start = static_cast<int>(seed % static_cast<uint64_t>(count));
  for (int i = 0; i < count; ++i) {
    const int port = range.first + (start + i) % count;
    const int holder = Hold(port);
    if (holder < 0) continue;
    if (Free(port)) return MasterPort(port, holder);
    ::close(holder);
  }
  return absl::UnavailableError(absl::StrCat("no port of ", range.ToString(),
                                             " is free on this machine for MASTER_PORT; give the "
                                             "daemon other --rank-ports"));
}

MasterPort::MasterPort(MasterPort&& other) noexcept
    : port_(other.port_), holder_(std::exchange(other.holder_, -1)) {}

MasterPort::~MasterPort() {
  if (holder_ >= 0) ::close(holder_);
}

}  // namespace muster::worker
