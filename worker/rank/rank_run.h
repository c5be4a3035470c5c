// One rank process from its assignment to its exit report.
#ifndef MUSTER_WORKER_RANK_RANK_RUN_H_
#define MUSTER_WORKER_RANK_RANK_RUN_H_

#include <string>

#include "base/log.h"
#include "worker/rank/rank_exit.h"

namespace muster::worker {

// Reads the RankAssignment at `path`, trains, writes exit.pb into the run directory and ends the
// process with an ExitCode. Returns, with one, only when something fails before training.
//
// The rank trains on while the daemon or the coordinator is away. It ends when the last step is
// done; at the next step boundary after SIGTERM or when its daemon asks; at once when SIGTERM comes
// before training or a second time, or when the attempt is over; and when the engine fails, which
// includes a collective that fails because a peer has ended. It may be killed at any instruction:
// only committed checkpoints count. Lines for people go to stdout, the log to stderr in
// `format`.
//
// Must be called on the main thread before any other thread exists, because it blocks signals for
// all threads.
int RunRank(const std::string& path, LogFormat format);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_RANK_RUN_H_
