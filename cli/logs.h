// `muster logs`.
#ifndef MUSTER_CLI_LOGS_H_
#define MUSTER_CLI_LOGS_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct LogsOptions {
  std::string job;
  int32_t rank = 0;
  uint64_t epoch = 0;      // of the attempt; 0 = the newest
  bool follow = false;     // wait for more, through restarts of job and coordinator
  int64_t tail_bytes = 0;  // only the last ones; 0 = all
  std::string since;       // as ParseSince() takes it; "" = all; not with tail_bytes
  // Lines of all ranks in order of time, each with its rank; not with `follow`.
  bool all_ranks = false;
  std::string grep;  // only lines that match this POSIX extended expression; "" = all
};
absl::Status Logs(CoordinatorClient& client, const LogsOptions& options, Format format,
                  Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_LOGS_H_
