#include "base/network.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"

namespace muster {
namespace {

// The address as 4 or 16 bytes in network order, without its zone; empty when it is no address.
std::vector<uint8_t> BytesOf(const std::string& address) {
  const std::string plain = address.substr(0, address.find('%'));
  std::vector<uint8_t> bytes(16);
  if (inet_pton(AF_INET6, plain.c_str(), bytes.data()) == 1) return bytes;
  bytes.resize(4);
  if (plain == address && inet_pton(AF_INET, plain.c_str(), bytes.data()) == 1) return bytes;
  return {};
}

std::string NumericText(const sockaddr* address, socklen_t size) {
  char host[NI_MAXHOST] = {};
  return getnameinfo(address, size, host, sizeof(host), nullptr, 0, NI_NUMERICHOST) == 0 ? host
                                                                                         : "";
}

// Calls `use` for each result of getaddrinfo until it returns true.
template <typename Use>
void ForEachAddress(const std::string& host, int flags, Use use) {
  addrinfo hints = {};
  hints.ai_flags = flags;
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* found = nullptr;
  // getaddrinfo needs a port; which one does not matter.
  if (getaddrinfo(host.c_str(), "9", &hints, &found) != 0) return;
  for (const addrinfo* entry = found; entry != nullptr; entry = entry->ai_next) {
    if (use(*entry)) break;
  }
  freeaddrinfo(found);
}

std::vector<InterfaceAddress> OwnAddresses() {
  std::vector<InterfaceAddress> addresses;
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return addresses;
  for (const ifaddrs* entry = list; entry != nullptr; entry = entry->ifa_next) {
    if (entry->ifa_addr == nullptr || (entry->ifa_flags & IFF_UP) == 0) continue;
    const int family = entry->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    std::string text = NumericText(entry->ifa_addr,
                                   family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (!text.empty()) addresses.push_back({entry->ifa_name, std::move(text)});
  }
  freeifaddrs(list);
  return addresses;
}

// The local address of the route to `to`. Connecting a datagram socket chooses a route and sends
// nothing.
std::string SourceTowards(const std::string& to) {
  std::string source;
  ForEachAddress(to, AI_NUMERICHOST, [&source](const addrinfo& entry) {
    const int fd = socket(entry.ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0) return false;
    sockaddr_storage own = {};
    socklen_t size = sizeof(own);
    if (connect(fd, entry.ai_addr, entry.ai_addrlen) == 0 &&
        getsockname(fd, reinterpret_cast<sockaddr*>(&own), &size) == 0) {
      source = NumericText(reinterpret_cast<sockaddr*>(&own), size);
    }
    close(fd);
    return !source.empty();
  });
  return source;
}

std::vector<std::string> Resolve(const std::string& host) {
  std::vector<std::string> addresses;
  ForEachAddress(host, 0, [&addresses](const addrinfo& entry) {
    addresses.push_back(NumericText(entry.ai_addr, entry.ai_addrlen));
    return false;
  });
  return addresses;
}

}  // namespace

std::string HostPort::ToString() const {
  return absl::StrContains(host, ':') ? absl::StrCat("[", host, "]:", port)
                                      : absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseHostPort(absl::string_view text) {
  const auto bad = [text](absl::string_view why) {
    return absl::InvalidArgumentError(absl::StrCat("'", text, "' is not HOST:PORT: ", why));
  };
  const size_t colon = text.rfind(':');
  if (colon == absl::string_view::npos) return bad("it has no port");
  HostPort result{std::string(text.substr(0, colon)), std::string(text.substr(colon + 1))};
  int port = 0;
  if (!absl::SimpleAtoi(result.port, &port) || port < 0 || port > 65535) {
    return bad("the port is not a number from 0 to 65535");
  }
  if (absl::StartsWith(result.host, "[") && absl::EndsWith(result.host, "]")) {
    result.host = result.host.substr(1, result.host.size() - 2);
  } else if (absl::StrContains(result.host, ':')) {
    return bad("an IPv6 address needs brackets, as in [::1]:7070");
  }
  if (result.host.empty()) return bad("it has no host");
  return result;
}

bool IsIpAddress(const std::string& text) { return !BytesOf(text).empty(); }

bool IsLoopbackAddress(const std::string& address) {
  const std::vector<uint8_t> bytes = BytesOf(address);
  if (bytes.size() == 4) return bytes[0] == 127;
  return bytes == BytesOf("::1");
}

bool IsWildcardAddress(const std::string& address) {
  const std::vector<uint8_t> bytes = BytesOf(address);
  return !bytes.empty() && bytes == std::vector<uint8_t>(bytes.size());
}

bool IsLinkLocalAddress(const std::string& address) {
  const std::vector<uint8_t> bytes = BytesOf(address);
  if (bytes.size() == 4) return bytes[0] == 169 && bytes[1] == 254;
  return bytes.size() == 16 && bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;
}

absl::StatusOr<bool> InCidr(const std::string& address, const std::string& cidr) {
  const std::vector<std::string> parts = absl::StrSplit(cidr, '/');
  const std::vector<uint8_t> network = BytesOf(parts[0]);
  int bits = 0;
  if (parts.size() != 2 || network.empty() || !absl::SimpleAtoi(parts[1], &bits) || bits < 0 ||
      bits > static_cast<int>(network.size()) * 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", cidr, "' is no network such as 10.0.0.0/8"));
  }
  const std::vector<uint8_t> bytes = BytesOf(address);
  if (bytes.size() != network.size()) return false;
  for (int bit = 0; bit < bits; ++bit) {
    const auto at = static_cast<size_t>(bit / 8);
    const int mask = 0x80 >> (bit % 8);
    if ((bytes[at] & mask) != (network[at] & mask)) return false;
  }
  return true;
}

std::string Advertised(const std::string& listening, const std::string& reachable) {
  absl::string_view bare = listening;
  const bool https = absl::ConsumePrefix(&bare, "https://");
  absl::StatusOr<HostPort> parsed = ParseHostPort(std::string(bare));
  if (!parsed.ok() || !IsWildcardAddress(parsed->host) || reachable.empty()) return listening;
  parsed->host = reachable;
  return absl::StrCat(https ? "https://" : "", parsed->ToString());
}

absl::StatusOr<PortRange> PortRange::Parse(const std::string& text) {
  if (text.empty()) return PortRange{};
  const std::vector<std::string> ends = absl::StrSplit(text, '-');
  PortRange range;
  if (ends.size() > 2 || !absl::SimpleAtoi(ends.front(), &range.first) ||
      !absl::SimpleAtoi(ends.back(), &range.last) || range.first < 1 || range.last > 65535 ||
      range.first > range.last) {
    return absl::InvalidArgumentError(
        absl::StrCat("'", text, "' is no range of ports such as 20000-20999"));
  }
  return range;
}

std::string PortRange::ToString() const {
  return first == 0 ? "any" : absl::StrCat(first, "-", last);
}

NetworkView NetworkView::OfThisMachine() { return {OwnAddresses, SourceTowards, Resolve}; }

std::string OutsideAddress(const NetworkView& network) {
  const auto useful = [](const std::string& address) {
    return !address.empty() && !IsLoopbackAddress(address) && !IsLinkLocalAddress(address);
  };
  // Addresses reserved for documentation (RFC 5737, RFC 3849): only the default route leads there.
  for (const char* const nowhere : {"192.0.2.1", "2001:db8::1"}) {
    if (std::string source = network.source_towards(nowhere); useful(source)) return source;
  }
  for (const InterfaceAddress& entry : network.interfaces()) {
    if (useful(entry.address)) return entry.address;
  }
  return "";
}

}  // namespace muster
