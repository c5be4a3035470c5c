// One rank process from its assignment to its exit report.
#ifndef MUSTER_WORKER_RANK_RANK_RUN_H_
#define MUSTER_WORKER_RANK_RANK_RUN_H_

#include <string>

namespace muster::worker {

// Exit codes of `muster-rank --assignment`.
enum ExitCode {
  kExitCompleted = 0,  // trained all steps
  kExitFailed = 1,     // exit.pb has the cause
  kExitUsage = 2,      // bad arguments, or the assignment cannot be read
  kExitStopped = 3,    // asked to (SIGTERM, or its daemon), or the attempt is over
};

// Reads the RankAssignment at `path`, trains, and ends with exit.pb in the run directory.
//
// Trains on while the daemon or the coordinator is away. Ends by itself when the last step is
// done, at the next step boundary after SIGTERM or the daemon's wish, at once when SIGTERM comes
// before training or a second time, when the attempt is over, and on any failure of the engine;
// a failed collective (a peer died) is one. May be killed at any instruction: what counts is what
// was committed. Progress for people goes to stdout, JSON logs to stderr.
//
// Must be called on the main thread before any other thread exists: it blocks signals for all of
// them. Returns only an exit code of what goes wrong before training; else it ends the process.
int RunRank(const std::string& path);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_RANK_RUN_H_
