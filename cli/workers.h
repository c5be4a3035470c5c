// `muster get workers`.
#ifndef MUSTER_CLI_WORKERS_H_
#define MUSTER_CLI_WORKERS_H_

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

absl::Status GetWorkers(CoordinatorClient& client, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_WORKERS_H_
