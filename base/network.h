// Network addresses as text (HOST:PORT with brackets around IPv6, wildcards, loopback, CIDR), and
// the addresses of this machine. Workers are reached by numeric addresses, so that no host name of
// theirs has to resolve.
#ifndef MUSTER_BASE_NETWORK_H_
#define MUSTER_BASE_NETWORK_H_

#include <functional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

struct HostPort {
  std::string host;  // without brackets
  std::string port;

  // "10.0.0.1:7070", "[fd00::1]:7070".
  std::string ToString() const;
};
// kInvalidArgument: no port, or an IPv6 address without brackets.
absl::StatusOr<HostPort> ParseHostPort(absl::string_view text);

// A numeric IPv4 or IPv6 address, without brackets; an IPv6 one may have a zone ("fe80::1%eth0").
bool IsIpAddress(const std::string& text);
bool IsLoopbackAddress(const std::string& address);   // 127.0.0.0/8, ::1
bool IsWildcardAddress(const std::string& address);   // 0.0.0.0, ::
bool IsLinkLocalAddress(const std::string& address);  // 169.254.0.0/16, fe80::/10

// True when `address` is in `cidr` ("10.0.0.0/8"). kInvalidArgument: `cidr` is none.
absl::StatusOr<bool> InCidr(const std::string& address, const std::string& cidr);

// The address at which others reach a service that listens on `listening` (HOST:PORT, or the same
// behind https://): the same,
// but with `reachable` in place of a wildcard host, which nobody can dial.
std::string Advertised(const std::string& listening, const std::string& reachable);

// Ports to listen on, both ends included; {0, 0}: the system picks.
struct PortRange {
  int first = 0;
  int last = 0;

  // "20000-20999" or "20000"; empty = any. kInvalidArgument.
  static absl::StatusOr<PortRange> Parse(const std::string& text);
  std::string ToString() const;  // "20000-20999", "any"
};

struct InterfaceAddress {
  std::string interface;  // "eth0"
  std::string address;    // numeric, without brackets; link-local IPv6 ones end with "%eth0"
};

// The network as a machine sees it; tests make up another one.
struct NetworkView {
  // Every address of every interface that is up.
  std::function<std::vector<InterfaceAddress>()> interfaces;
  // The local address of the route to a numeric address; empty without a route. Sends nothing.
  std::function<std::string(const std::string& to)> source_towards;
  // Numeric addresses of a host name or of a numeric address; may wait for DNS.
  std::function<std::vector<std::string>(const std::string& host)> resolve;

  static NetworkView OfThisMachine();
};

// An address of this machine at which others may reach it: the source address of the default route,
// else the first address that is neither loopback nor link-local. Empty: there is none.
std::string OutsideAddress(const NetworkView& network);

}  // namespace muster

#endif  // MUSTER_BASE_NETWORK_H_
