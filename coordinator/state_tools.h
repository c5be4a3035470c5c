// Tools for the durable state of a coordinator that does not run: check a backup, bring it back.
#ifndef MUSTER_COORDINATOR_STATE_TOOLS_H_
#define MUSTER_COORDINATOR_STATE_TOOLS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core/decision_replay.h"
#include "coordinator/core/restore.h"
#include "coordinator/core/state_log.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Where a coordinator with this --data-dir has its store.
inline std::string StateDirectoryOf(const std::string& data_dir) { return data_dir + "/store"; }

// Reads every row of the backup in `directory`, which is not changed. kNotFound: it holds no
// backup. kDataLoss: damaged, names the row or file. kFailedPrecondition: of a newer schema.
absl::StatusOr<StoreContents> VerifyBackup(const std::string& directory);

// Copies the backup in `directory` to the new data directory `data_dir` and makes it safe to serve
// from (MarkRestored), as a history drawn from `rng`. Errors as VerifyBackup; kAlreadyExists:
// `data_dir` has a state already; kUnavailable: I/O error. After an error `data_dir` has no state.
absl::StatusOr<StoreContents> RestoreBackup(const std::string& directory,
                                            const std::string& data_dir, Rng& rng, absl::Time now);

// A snapshot's file, or a backup, to replay.
struct ReplayOptions {
  std::string path;
  std::string from;    // an earlier one, whose state the fold begins with; empty: from nothing
  uint64_t until = 0;  // the last entry to fold; 0 = all
};
struct ReplayReport {
  std::string cluster_id;
  Replayed replayed;
  std::vector<v1::Job> jobs;  // as of the last entry, by submission: id, name, state, message,
                              // epoch, attempts, failures, last committed step
  DecisionReport decisions;
};
// Folds the log of changes, compares the result with the stored rows, and makes the plans of the
// scheduler again, as this program decides, on the way. kNotFound, kDataLoss,
// kFailedPrecondition (another schema) name the file.
absl::StatusOr<ReplayReport> ReplayState(const ReplayOptions& options);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_STATE_TOOLS_H_
