// The names of the files in a rank's run directory, STATE/attempts/<job id>.e<epoch>/rank-<n>/,
// through which the daemon, the rank's shim and the rank leave each other what must survive any of
// them. Each name begins with a slash and is appended to the path of the directory. Files are
// written atomically: what can be read is whole.
#ifndef MUSTER_WORKER_RUN_DIRECTORY_RUN_DIRECTORY_H_
#define MUSTER_WORKER_RUN_DIRECTORY_RUN_DIRECTORY_H_

#include <cstdint>
#include <string>

#include "absl/strings/str_cat.h"

namespace muster::worker {

// The verb of `muster-worker` that is the rank process of a command (worker/command), followed by
// the path of the rank's assignment.
constexpr char kCommandVerb[] = "command";

// Written by the daemon for the rank: a v1::RankAssignment.
constexpr char kAssignmentFile[] = "/assignment.pb";
// Written by the daemon for the rank: a v1::ProfileSteps, the newest request to record steps.
constexpr char kProfileRequestFile[] = "/profile.pb";

// Of a rank that runs as an account of its own: a link to the directory that has the files which
// the rank writes, and those that are written for it (worker/daemon/rank_files.h).
constexpr char kOwnDirectory[] = "/own";

// Written by the daemon for later daemons: a v1::HeldByRank.
constexpr char kHeldFile[] = "/held.pb";

// Written by the shim for the daemon: a v1::ShimRecord and a v1::ShimExit, in JSON.
constexpr char kShimFile[] = "/shim.json";
constexpr char kShimExitFile[] = "/exit.json";
// Locked by the shim for as long as it lives. Its own messages are in it.
constexpr char kShimLockFile[] = "/shim.lock";
// What the rank prints (worker/daemon/log_files.h).
constexpr char kLogDirectory[] = "/log";

// Written by the rank for the daemon: a v1::RankExitReport.
constexpr char kRankExitFile[] = "/exit.pb";
// Written by the rank for the daemon: a v1::CommitRequest for each checkpoint that no daemon has
// taken.
constexpr char kCommitDirectory[] = "/commits";
inline std::string CommitFile(int64_t step) {
  return absl::StrCat(kCommitDirectory, "/", step, ".pb");
}
// Written by a command (JobSpec.command) for its rank process: what it says of its progress.
constexpr char kCommandProgressFile[] = "/progress.json";
// Written by a command for the daemon: why it failed, as PyTorch's @record writes it.
constexpr char kCommandErrorFile[] = "/error.json";
// Written by the rank for people: its collectives when it failed.
constexpr char kCollectivesLogFile[] = "/collectives.log";
// Written by the rank for the daemon: a v1::CollectiveRecord, the answer to the request of this
// number.
inline std::string CollectivesFile(uint64_t number) {
  return absl::StrCat("/collectives-", number, ".pb");
}
// Written by the rank for the daemon: the trace of these steps, or why there is none.
inline std::string ProfileTraceFile(int64_t first_step, int64_t steps) {
  return absl::StrCat("/profile-", first_step, "-", steps, ".json");
}
inline std::string ProfileFailureFile(int64_t first_step, int64_t steps) {
  return absl::StrCat("/profile-", first_step, "-", steps, ".failed");
}

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RUN_DIRECTORY_RUN_DIRECTORY_H_
