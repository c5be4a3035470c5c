// Commands for operators: `muster admin ...`.
#ifndef MUSTER_CLI_ADMIN_H_
#define MUSTER_CLI_ADMIN_H_

#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

absl::Status RemoveWorker(CoordinatorClient& client, const std::string& name, Format format,
                          Terminal& terminal);
absl::Status Backup(CoordinatorClient& client, Format format, Terminal& terminal);

// Both run `muster-coordinator` on this machine and need no running coordinator.
struct StateOptions {
  std::string coordinator_binary;
  std::string backup;    // directory
  std::string data_dir;  // of RestoreState: the new data directory
};
absl::Status VerifyState(const StateOptions& options, Format format, Terminal& terminal);
absl::Status RestoreState(const StateOptions& options, Format format, Terminal& terminal);

// Writes the durable state with its log and the events to one file.
absl::Status Snapshot(CoordinatorClient& client, const std::string& path, Format format,
                      Terminal& terminal);

struct ReplayOptions {
  std::string file;     // of Snapshot, or a backup on this machine
  std::string from;     // an earlier one to begin with; empty = from nothing
  uint64_t until = 0;   // the last entry of the log; 0 = all
  bool strict = false;  // a plan that decides otherwise than then is an error
  std::string coordinator_binary;
};
// Folds the log, prints the jobs that it makes and what this program would have decided otherwise.
// kDataLoss: the stored state is another one. kFailedPrecondition: `strict`.
absl::Status ReplayState(const ReplayOptions& options, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_ADMIN_H_
