// `muster describe job`.
#ifndef MUSTER_CLI_DESCRIBE_H_
#define MUSTER_CLI_DESCRIBE_H_

#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

// Everything about one job: state, hosts, ranks, times, memory, ended attempts, checkpoints,
// events, spec.
absl::Status DescribeJob(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_DESCRIBE_H_
