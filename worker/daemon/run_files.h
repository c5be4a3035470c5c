// Reading and writing the files in a rank's run directory (worker/run_directory/run_directory.h).
#ifndef MUSTER_WORKER_DAEMON_RUN_FILES_H_
#define MUSTER_WORKER_DAEMON_RUN_FILES_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "muster/v1/daemon_state.pb.h"
#include "muster/v1/rank.pb.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {

// No value when the file is missing or cannot be parsed; of what the rank has written
// (rank_files.h), also when it is longer than any report.
std::optional<v1::ShimRecord> ReadShimRecord(const std::string& run_directory);
std::optional<v1::ShimExit> ReadShimExit(const std::string& run_directory);
std::optional<v1::RankExitReport> ReadRankExitReport(const std::string& run_directory);
// The daemon's own copy.
std::optional<v1::RankAssignment> ReadAssignment(const std::string& run_directory);
std::optional<v1::HeldByRank> ReadHeld(const std::string& run_directory);
// The commit requests that the rank left, by step; those that cannot be parsed are skipped.
std::vector<v1::CheckpointRecord> ReadCommitRequests(const std::string& run_directory);

// Makes what the first write of either below needs, which a process that forks others does for all
// of them.
void LoadFormats();
// Neither is synced. A crash of the machine ends every rank, and the daemon knows by the boot in
// which it ordered a start that the rank may have run.
absl::Status WriteShimRecord(const std::string& run_directory, const v1::ShimRecord& record);
absl::Status WriteShimExit(const std::string& run_directory, const v1::ShimExit& exit);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RUN_FILES_H_
