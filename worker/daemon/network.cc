#include "worker/daemon/network.h"

#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace muster::worker {
namespace {

constexpr int kFirstPortMin = 1024;  // below, only root may listen

std::string Listed(const std::vector<InterfaceAddress>& addresses) {
  return absl::StrJoin(addresses, ", ", [](std::string* out, const InterfaceAddress& entry) {
    absl::StrAppend(out, entry.address, " (", entry.interface, ")");
  });
}

// The first address that the choice names.
absl::StatusOr<std::string> Chosen(const NetworkView& network, const AddressChoice& choice) {
  const bool by_address = !choice.address.empty();
  const std::string& wanted = by_address ? choice.address : choice.interface;
  const char* const flag = by_address ? "--address" : "--interface";
  if (by_address && !choice.interface.empty()) {
    return absl::InvalidArgumentError("--address and --interface exclude each other");
  }
  if (by_address && !IsIpAddress(wanted)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--address: '", wanted, "' is no numeric IP address; --interface takes a name"));
  }
  if (IsWildcardAddress(wanted)) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": ", wanted, " is no address that others can reach"));
  }
  const std::vector<InterfaceAddress> addresses = network.interfaces();
  std::string link_local;
  for (const InterfaceAddress& entry : addresses) {
    bool match = entry.address == wanted;
    if (!by_address && absl::StrContains(wanted, '/')) {
      ASSIGN_OR_RETURN(match, InCidr(entry.address, wanted));
    } else if (!by_address && !match) {
      match = entry.interface == wanted;
    }
    if (!match) continue;
    if (!IsLinkLocalAddress(entry.address) || entry.address == wanted) return entry.address;
    if (link_local.empty()) link_local = entry.address;
  }
  if (!link_local.empty()) return link_local;
  return absl::InvalidArgumentError(absl::StrCat(flag,
                                                 ": no interface of this machine that is up has ",
                                                 wanted, "; it has ", Listed(addresses)));
}

}  // namespace

absl::StatusOr<WorkerAddress> FindAddress(const NetworkView& network, const AddressChoice& choice,
                                          const std::string& coordinator) {
  WorkerAddress found;
  if (!choice.address.empty() || !choice.interface.empty()) {
    ASSIGN_OR_RETURN(found.address, Chosen(network, choice));
    return found;
  }
  ASSIGN_OR_RETURN(const HostPort target, ParseHostPort(coordinator));
  const std::vector<std::string> resolved = network.resolve(target.host);
  if (resolved.empty()) {
    return absl::UnavailableError(
        absl::StrCat("the coordinator's host ", target.host, " does not resolve"));
  }
  for (const std::string& to : resolved) {
    found.address = network.source_towards(to);
    if (!found.address.empty()) break;
  }
  if (found.address.empty()) {
    return absl::UnavailableError(
        absl::StrCat("no route leads to the coordinator at ", absl::StrJoin(resolved, ", ")));
  }
  if (IsLoopbackAddress(found.address)) found.outside_address = OutsideAddress(network);
  return found;
}

absl::Status CheckPortRange(const std::string& text, int ranks) {
  if (text.empty()) return absl::OkStatus();
  const absl::StatusOr<PortRange> range = PortRange::Parse(text);
  // A single port never suffices: every rank needs two.
  if (!range.ok() || range->first < kFirstPortMin || !absl::StrContains(text, '-')) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--rank-ports: '", text, "' is no range of ports from 1024 to 65535 such as 20000-20999"));
  }
  if (const int ports = range->last - range->first + 1; ports < 2 * ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("--rank-ports: ", text, " has ", ports, " ports, but ", ranks,
                     " ranks may run here, each with a port for its peers and one for metrics"));
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
