#include "worker/daemon/daemon_options.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/network.h"
#include "base/status_macros.h"

namespace muster::worker {

absl::Status CheckOptions(const DaemonOptions& options) {
  const bool plain = std::all_of(options.name.begin(), options.name.end(), [](char c) {
    return absl::ascii_islower(static_cast<unsigned char>(c)) ||
           absl::ascii_isdigit(static_cast<unsigned char>(c)) || c == '-' || c == '.';
  });
  if (options.name.empty() || options.name.size() > 63 || !plain) {
    return absl::InvalidArgumentError(absl::StrCat("worker name '", options.name.substr(0, 80),
                                                   "' is not 1-63 characters of [a-z0-9-.]"));
  }
  if (options.slots < 0 || options.slots > 4096) {
    return absl::InvalidArgumentError(
        absl::StrCat("slots: ", options.slots, " is not between 0 and 4096"));
  }
  if (options.coordinator.empty()) {
    return absl::InvalidArgumentError("no coordinator address was given");
  }
  const bool plain_id = std::all_of(options.host_id.begin(), options.host_id.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '.' || c == '_';
  });
  if (options.host_id.size() > 64 || !plain_id) {
    return absl::InvalidArgumentError(absl::StrCat("--host-id: '", options.host_id.substr(0, 80),
                                                   "' is not 1-64 characters of [A-Za-z0-9._-]"));
  }
  for (const std::string& path : options.files.allowed_paths) {
    if (path.empty() || path[0] != '/') {
      return absl::InvalidArgumentError(
          absl::StrCat("--allow-path: '", path, "' is not an absolute path"));
    }
  }
  RETURN_IF_ERROR(security::CheckJobUser(options.user));
  // A flag that names nothing of this machine is a mistake. Without one the route to the
  // coordinator decides, which need not be there yet.
  if (!options.address.address.empty() || !options.address.interface.empty()) {
    RETURN_IF_ERROR(FindAddress(NetworkView::OfThisMachine(), options.address, "").status());
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
