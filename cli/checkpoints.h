// The checkpoints of a job: `muster checkpoints` and `muster sample`.
#ifndef MUSTER_CLI_CHECKPOINTS_H_
#define MUSTER_CLI_CHECKPOINTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"
#include "muster/v1/job.pb.h"

namespace muster::cli {

// A heading, and one row for each record.
std::vector<std::vector<std::string>> CheckpointRows(const v1::Job& job, bool with_removed);

absl::Status Checkpoints(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal);

struct SampleOptions {
  std::string job;
  std::string prompt;
  int64_t tokens = 200;
  double temperature = 1.0;
  int64_t top_k = 0;
  uint64_t seed = 0;
  int64_t step = 0;         // of the checkpoint; 0 = the newest
  bool verbose = false;     // tokens per second on stderr, also where that is no terminal
  std::string rank_binary;  // muster-rank
};
// Runs `muster-rank sample` on the newest sound checkpoint. kFailedPrecondition: there is none, or
// it is not readable on this machine.
absl::Status Sample(CoordinatorClient& client, const SampleOptions& options, Format format,
                    Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_CHECKPOINTS_H_
