// The supervisor of one rank process: a small single-threaded process between the daemon and the
// rank. With it either may die without the other, and the rank's output and exit status are never
// lost.
//
//   shim server (shim_server.h) --fork--> shim (own session, child subreaper) --fork--> rank (own
//   session)
//
// 1. It locks RUN_DIR/shim.lock, tells the daemon so, and waits for its answer to go on. Should the
//    daemon die first, it ends: nothing was started.
// 2. It forks the rank, writes RUN_DIR/shim.json, and only then lets the rank's program run. So
//    within a boot of the machine shim.json exists if and only if the rank may have run, and a rank
//    runs at most once.
// 3. It copies the rank's stdout and stderr to RUN_DIR/log (log_files.h).
// 4. When the rank has ended it writes RUN_DIR/exit.json, kills every descendant (as a subreaper it
//    inherits orphans, also those that made their own session), and ends when none is left.
// Where the rank runs as another account, the shim still is the daemon's user: what it writes is
// out of the rank's reach.
// If the shim itself is killed, the kernel kills the rank (PR_SET_PDEATHSIG).
#ifndef MUSTER_WORKER_DAEMON_SHIM_H_
#define MUSTER_WORKER_DAEMON_SHIM_H_

#include <sys/types.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "worker/daemon/log_files.h"

namespace muster::worker {

// The environment variable that tells a rank and its children their run directory.
constexpr char kRunDirectoryVariable[] = "MUSTER_RUN_DIRECTORY";
// The descriptor of the shim's end of its socket to the daemon.
constexpr int kShimSocket = 3;
// Messages on the socket: kShimGo is the daemon's, the others are the shim's.
constexpr char kShimLocked = 'L';
constexpr char kShimGo = 'G';
constexpr char kShimRunning = 'R';
constexpr int kShimExitAlreadyRun = 3;  // another shim has, or had, this run directory

struct ShimOptions {
  std::string run_directory;
  std::string working_directory;
  LogLimits log;
  // As which account the rank runs, and where its own files are (rank_files.h); absent: as the
  // shim's user, in run_directory.
  struct User {
    uid_t uid = 0;
    gid_t gid = 0;
    std::vector<gid_t> groups;
    std::string directory;
  };
  std::optional<User> user;
  std::vector<std::string> command;  // absolute program path, then its arguments
};
// Verbs of `muster-worker`: RunShim with the arguments that follow, and RunShimServer.
constexpr char kShimVerb[] = "shim";
constexpr char kShimServerVerb[] = "shim-server";

// Rank programs that are part of this one: given a command, what carries it out and returns its
// exit status, in the rank's process, without loading a program first; empty: the command is a
// program of its own. Ranks of another account than the shim's are always loaded anew, so that
// nothing of the daemon's memory is in their processes.
using ProgramsInside = std::function<std::function<int()>(const std::vector<std::string>& command)>;

// Writes the options as arguments of `muster-worker`, and reads them back. An empty command: the
// arguments are not understood.
std::vector<std::string> ShimArguments(const ShimOptions& options);
ShimOptions ParseShimArguments(const std::vector<std::string>& arguments);

// Returns the shim's exit status. Requires: no other thread in the process.
int RunShim(const ShimOptions& options, const ProgramsInside& inside = nullptr);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SHIM_H_
