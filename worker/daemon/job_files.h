// What a job may have of this machine's files: the secrets that its spec refers to, and the
// directories in which its paths may lie (docs/security.md).
#ifndef MUSTER_WORKER_DAEMON_JOB_FILES_H_
#define MUSTER_WORKER_DAEMON_JOB_FILES_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/v1/job.pb.h"

namespace muster::worker {

struct JobFilePolicy {
  // A secret NAME of a job in queue Q is the file Q/NAME of it where that exists, else NAME. Empty:
  // there are none.
  std::string secrets_directory;
  // Absolute; working_directory and checkpoint.path lie in one of them. Empty: anywhere.
  std::vector<std::string> allowed_paths;
};

// The variables of `spec`'s env that refer to secrets, with their values. A file that another user
// could have written, or that all may read, is refused, and so is one outside the directory.
// kNotFound, kPermissionDenied, kInvalidArgument: say which secret and file, never a value.
absl::StatusOr<std::map<std::string, std::string>> ReadSecrets(const JobFilePolicy& policy,
                                                               const v1::JobSpec& spec);

// `path` with its symbolic links followed; what does not exist yet stays as it is written.
// kPermissionDenied: that lies in none of the allowed directories. kInvalidArgument: it is not
// absolute, or a link in it leads nowhere.
absl::StatusOr<std::string> AllowedPath(const JobFilePolicy& policy, const std::string& path);

// Whether the paths of `spec` are allowed; the errors of the function above, with the field.
absl::Status CheckJobPaths(const JobFilePolicy& policy, const v1::JobSpec& spec);
// Whether this machine gives `spec` all it refers to; the errors of all functions above.
absl::Status CheckJobFiles(const JobFilePolicy& policy, const v1::JobSpec& spec);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_JOB_FILES_H_
