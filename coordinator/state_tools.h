// Tools for the durable state of a coordinator that does not run: check a backup, bring it back.
#ifndef MUSTER_COORDINATOR_STATE_TOOLS_H_
#define MUSTER_COORDINATOR_STATE_TOOLS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core/restore.h"

namespace muster::coordinator {

// Where a coordinator with this --data-dir has its store.
inline std::string StateDirectoryOf(const std::string& data_dir) { return data_dir + "/store"; }

// Reads every row of the backup in `directory`, which is not changed. kNotFound: it holds no
// backup. kDataLoss: damaged, names the row or file. kFailedPrecondition: of a newer schema.
absl::StatusOr<StoreContents> VerifyBackup(const std::string& directory);

// Copies the backup in `directory` to the new data directory `data_dir` and makes it safe to serve
// from (MarkRestored). Errors as VerifyBackup; kAlreadyExists: `data_dir` has a state already;
// kUnavailable: I/O error. After an error `data_dir` has no state.
absl::StatusOr<StoreContents> RestoreBackup(const std::string& directory,
                                            const std::string& data_dir, absl::Time now);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_STATE_TOOLS_H_
