// `muster plan`.
#ifndef MUSTER_CLI_PLAN_H_
#define MUSTER_CLI_PLAN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct PlanOptions {
  std::string file;  // "-" = stdin
  std::vector<std::string> overrides;
  std::string working_directory;
  uint64_t device_memory = 0;  // bytes for each rank; 0 = not asked
  std::string rank_binary;     // muster-rank
};
// Prints the memory and work of every rank of a spec. Runs `muster-rank plan`, which has the
// engine; needs no data or device. With `client` also whether it would start on that cluster now.
absl::Status Plan(const PlanOptions& options, CoordinatorClient* client, Format format,
                  Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PLAN_H_
