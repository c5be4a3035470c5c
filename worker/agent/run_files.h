// The files in a rank's run directory, ATTEMPTS/<job id>.e<epoch>/rank-<n>/.
#ifndef MUSTER_WORKER_AGENT_RUN_FILES_H_
#define MUSTER_WORKER_AGENT_RUN_FILES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "muster/v1/daemon_state.pb.h"
#include "muster/v1/rank.pb.h"

namespace muster::worker {

constexpr char kAssignmentFile[] = "/assignment.pb";
constexpr char kShimFile[] = "/shim.json";
constexpr char kShimExitFile[] = "/exit.json";
constexpr char kRankExitFile[] = "/exit.pb";
constexpr char kShimLockFile[] = "/shim.lock";
constexpr char kShimErrorFile[] = "/shim.log";  // the shim's own complaints
constexpr char kLogDirectory[] = "/log";
constexpr char kCommitDirectory[] = "/commits";
// A v1::CollectiveRecord, followed by its number and kCollectivesEnd.
constexpr char kCollectivesFile[] = "/collectives-";
constexpr char kCollectivesEnd[] = ".pb";
// A v1::ProfileSteps that the rank is to record; see worker/rank/profiler.h.
constexpr char kProfileRequestFile[] = "/profile.pb";
// What it then leaves, with ".json" or ".failed" behind it.
std::string ProfileFile(const v1::ProfileSteps& steps);

// Absent when the file is missing or not whole (they are written atomically).
std::optional<v1::ShimRecord> ReadShimRecord(const std::string& run_directory);
std::optional<v1::ShimExit> ReadShimExit(const std::string& run_directory);
std::optional<v1::RankExitReport> ReadRankExitReport(const std::string& run_directory);
// Commit requests that the rank left (RUN_DIR/commits/<step>.pb), by step; unreadable ones are not
// whole and are skipped.
std::vector<v1::CheckpointRecord> ReadCommitRequests(const std::string& run_directory);

absl::Status WriteShimRecord(const std::string& run_directory, const v1::ShimRecord& record);
absl::Status WriteShimExit(const std::string& run_directory, const v1::ShimExit& exit);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_AGENT_RUN_FILES_H_
