// Reads a small document of the web, by libcurl.
#ifndef MUSTER_SECURITY_FETCH_H_
#define MUSTER_SECURITY_FETCH_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::security {

// kInvalidArgument: not https://..., or http:// of this host (127.0.0.1, [::1], localhost), from
// which nobody else could answer.
absl::Status CheckKeyUrl(const std::string& url);

// The body of a reply of status 200, at most 1 MiB. The server must have a certificate of an
// authority of this system; redirections are not followed. Blocks for at most `patience`.
// kUnavailable says why there is none. kUnimplemented: this build has no libcurl.
absl::StatusOr<std::string> Fetch(const std::string& url, absl::Duration patience);

}  // namespace muster::security

#endif  // MUSTER_SECURITY_FETCH_H_
