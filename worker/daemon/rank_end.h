// How a rank process ended, put together from what it, its shim and the kernel left.
#ifndef MUSTER_WORKER_DAEMON_RANK_END_H_
#define MUSTER_WORKER_DAEMON_RANK_END_H_

#include <sys/types.h>

#include <optional>
#include <string>

#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/keys.h"

namespace muster::worker {

// A rank process that has ended.
struct EndedRank {
  RankKey key;
  pid_t pid = 0;
  std::string boot_id;  // of the machine when the rank ran
  std::string run_directory;
  std::string worker;  // for messages
};

struct RankEnd {
  v1::RankExit exit;
  std::optional<v1::RankProgress> progress;  // from the rank's own exit report
};

// The rank's own report counts before all else; without it the cause is worker lost (the machine
// went down), launch (its program could not be run), out of memory (the kernel killed it), crash
// (a signal or a status other than 0) or completed. The message names the rank, its pid, the worker
// and where its log is, and of a command that failed the line that it printed last.
RankEnd ExplainEnd(const EndedRank& rank);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RANK_END_H_
