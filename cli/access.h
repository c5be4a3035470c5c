// Commands about who may call: `muster admin token`, `muster audit`.
#ifndef MUSTER_CLI_ACCESS_H_
#define MUSTER_CLI_ACCESS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct TokenOptions {
  std::string user;
  std::vector<std::string> roles;
  std::string expires = "30d";
  std::string id;
};
// Prints the token, once.
absl::Status TokenCreate(CoordinatorClient& client, const TokenOptions& options, Format format,
                         Terminal& terminal);
absl::Status TokenList(CoordinatorClient& client, Format format, Terminal& terminal);
absl::Status TokenRevoke(CoordinatorClient& client, const TokenOptions& options, Format format,
                         Terminal& terminal);

// `since`: a time ago such as 24h or 7d, a moment of RFC 3339, or empty for all that is kept.
absl::Status Audit(CoordinatorClient& client, const std::string& since, Format format,
                   Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_ACCESS_H_
