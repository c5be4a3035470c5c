// The supervisor of one rank process: a small single-threaded process (`muster-worker shim`) that
// stands between the daemon and the rank so that neither's death takes the other along, and so that
// the rank's output and exit status are never lost.
//
//   daemon --spawn--> shim (own session, child subreaper) --fork--> rank (own session)
//
// 1. It locks RUN_DIR/shim.lock, tells the daemon so, and waits for the word to go. Should the
//    daemon have died, it ends: nothing was started.
// 2. It forks the rank, writes RUN_DIR/shim.json, and only then lets the rank's program run. So
//    shim.json exists if and only if the rank may have run, and a rank runs at most once.
// 3. It copies the rank's stdout and stderr to RUN_DIR/log (log_files.h).
// 4. When the rank has ended it writes RUN_DIR/exit.json, kills every descendant (as a subreaper it
//    inherits orphans, also those that made their own session), and ends when none is left.
// If the shim itself is killed, the kernel kills the rank (PR_SET_PDEATHSIG).
#ifndef MUSTER_WORKER_DAEMON_SHIM_H_
#define MUSTER_WORKER_DAEMON_SHIM_H_

#include <string>
#include <vector>

#include "worker/daemon/log_files.h"

namespace muster::worker {

// In the environment of each rank and its children: the run directory they belong to.
constexpr char kRunDirectoryVariable[] = "MUSTER_RUN_DIRECTORY";
// The shim's end of its socket to the daemon.
constexpr int kShimSocket = 3;
// The shim's messages to the daemon, and the daemon's to the shim.
constexpr char kShimLocked = 'L';
constexpr char kShimGo = 'G';
constexpr char kShimRunning = 'R';
constexpr int kShimExitAlreadyRun = 3;  // another shim has, or had, this run directory

struct ShimOptions {
  std::string run_directory;
  std::string working_directory;
  LogLimits log;
  std::vector<std::string> command;  // absolute program path, then its arguments
};
// The arguments that make `muster-worker` run this shim, and back. Empty command: not understood.
std::vector<std::string> ShimArguments(const ShimOptions& options);
ShimOptions ParseShimArguments(const std::vector<std::string>& arguments);

// Returns the shim's exit status. Requires: no other thread in the process.
int RunShim(const ShimOptions& options);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SHIM_H_
