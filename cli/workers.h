// `muster get workers` and `muster describe worker`.
#ifndef MUSTER_CLI_WORKERS_H_
#define MUSTER_CLI_WORKERS_H_

#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

// `tree`: as a tree of the topology's domains, with what is free in each.
absl::Status GetWorkers(CoordinatorClient& client, bool tree, Format format, Terminal& terminal);

// Everything about one worker: devices, domains, faults. kNotFound.
absl::Status DescribeWorker(CoordinatorClient& client, const std::string& name, Format format,
                            Terminal& terminal);

// "schedulable", "cordoned", "draining until 12:05:00", "drained"; "avoided (2.4 faults)";
// with reservations behind it.
std::string SchedulingText(const v1::Worker& worker);

}  // namespace muster::cli

#endif  // MUSTER_CLI_WORKERS_H_
