// The commands about jobs and workers. Each writes to `terminal` and returns why it failed;
// kNotFound and the other codes are the coordinator's.
#ifndef MUSTER_CLI_JOBS_H_
#define MUSTER_CLI_JOBS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"
#include "muster/v1/spec.pb.h"

namespace muster::cli {

// The spec in a file ("-" = stdin), with `--set` applied and checked (spec::Load). kNotFound names
// the file; kInvalidArgument has every problem on a line of its own.
absl::StatusOr<v1::JobSpec> LoadSpec(const std::string& file,
                                     const std::vector<std::string>& overrides,
                                     const std::string& working_directory);

struct SubmitOptions {
  std::string file;  // "-" = stdin
  std::vector<std::string> overrides;
  std::string request_id;  // empty: one is made up
  std::string working_directory;
  bool watch = false;
  bool dry_run = false;
};
absl::Status Submit(CoordinatorClient& client, const SubmitOptions& options, Format format,
                    Terminal& terminal);

absl::Status GetJobs(CoordinatorClient& client, Format format, Terminal& terminal);
absl::Status GetJob(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal);
absl::Status GetWorkers(CoordinatorClient& client, Format format, Terminal& terminal);
absl::Status DescribeJob(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal);
absl::Status Cancel(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal);
absl::Status Checkpoints(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal);
// `job` empty = of the whole cluster. Follows across restarts of the coordinator.
absl::Status Events(CoordinatorClient& client, const std::string& job, bool follow, Format format,
                    Terminal& terminal);

struct LogsOptions {
  std::string job;
  int32_t rank = 0;
  uint64_t epoch = 0;
  bool follow = false;
  int64_t tail_bytes = 0;
};
absl::Status Logs(CoordinatorClient& client, const LogsOptions& options, Format format,
                  Terminal& terminal);

struct SampleOptions {
  std::string job;
  std::string prompt;
  int64_t tokens = 200;
  double temperature = 1.0;
  int64_t top_k = 0;
  uint64_t seed = 0;
  int64_t step = 0;         // of the checkpoint; 0 = the newest
  std::string rank_binary;  // muster-rank
};
// Runs `muster-rank sample` on the newest sound checkpoint; the checkpoint must be readable on this
// machine.
absl::Status Sample(CoordinatorClient& client, const SampleOptions& options, Format format,
                    Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_JOBS_H_
