// `muster queue`, `muster get spares` and `muster admin queues`.
#ifndef MUSTER_CLI_QUEUES_H_
#define MUSTER_CLI_QUEUES_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"
#include "muster/v1/queue.pb.h"

namespace muster::cli {

absl::Status Queues(CoordinatorClient& client, Format format, Terminal& terminal);
// The tree as a table: a row per queue and kind of device.
std::string QueueTable(const std::vector<v1::QueueStatus>& queues);
// A line per job for which slots are set aside. Empty: there is none.
std::string HeadsText(const std::vector<v1::HeadOfQueue>& heads);

// `muster get spares`.
absl::Status GetSpares(CoordinatorClient& client, Format format, Terminal& terminal);
// A row per level and kind of device, and what domains are too small. Empty: no spares are wanted.
std::string SpareTable(const std::vector<v1::SpareStatus>& spares);

// `file`: YAML, as docs/queues.md says.
absl::Status ApplyQueues(CoordinatorClient& client, const std::string& file, Format format,
                         Terminal& terminal);
absl::Status GetQueuePolicy(CoordinatorClient& client, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_QUEUES_H_
