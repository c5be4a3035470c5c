// `muster local`: a cluster of real processes on this machine, for trying Muster and for tests.
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

// Starts what is not running, with the data, names and slots it had. Safe to call twice, also at
// once. When something does not start, what this call started is ended again; the error quotes the
// end of its log.
absl::Status LocalUp(const LocalOptions& options, Format format, Terminal& terminal);

// Ends everything that was started, ranks included; nothing of it is left running. The state stays
// unless `purge`. OK when nothing ran.
absl::Status LocalDown(const LocalOptions& options, bool purge, Terminal& terminal);

// kNotFound when there is no cluster.
absl::Status LocalStatus(const LocalOptions& options, Format format, Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_LOCAL_H_
