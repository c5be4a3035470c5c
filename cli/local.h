// `muster local`: a cluster of processes on this machine, to try Muster and for tests.
//
// Below HOME/local:  lock           held while anything here is changed
//                    state.json     what was started: pids with start times, addresses
//                    coordinator/   the coordinator's data directory; address is its address file
//                    worker-N/      the state directory of worker N
//                    logs/NAME.log  stderr of each process
#ifndef MUSTER_CLI_LOCAL_H_
#define MUSTER_CLI_LOCAL_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cli/output.h"

namespace muster::cli {

struct LocalOptions {
  std::string home;      // absolute
  std::string binaries;  // directory of muster-coordinator and muster-worker
  int workers = 0;       // 0 = as before, or 2
  int slots = 0;         // per worker; 0 = as before, or 2
};

// Starts the processes that do not run, with the data, names and slots they had. Safe to call
// twice, also at the same time. When a process does not start, those that this call started are
// ended again; the error quotes the end of its log.
absl::Status LocalUp(const LocalOptions& options, Format format, Terminal& terminal);

// Ends all processes of the cluster, ranks included. Removes its state if `purge`. OK when nothing
// ran.
absl::Status LocalDown(const LocalOptions& options, bool purge, Terminal& terminal);

// kNotFound when there is no cluster.
absl::Status LocalStatus(const LocalOptions& options, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_LOCAL_H_
