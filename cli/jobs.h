// The commands that submit, list and cancel jobs. Each writes to `terminal` and returns why it
// failed; kNotFound and the other codes are the coordinator's.
#ifndef MUSTER_CLI_JOBS_H_
#define MUSTER_CLI_JOBS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct SubmitOptions {
  std::vector<std::string> files;  // "-" = stdin; each may hold several documents
  std::vector<std::string> overrides;
  std::string request_id;  // empty: a random one
  std::string working_directory;
  bool watch = false;
  bool dry_run = false;
};
// Everything is read and checked before the first is submitted. Of several jobs those that the
// coordinator refuses are named on stderr, and the others submitted.
absl::Status Submit(CoordinatorClient& client, const SubmitOptions& options, Format format,
                    Terminal& terminal);

// `tasks`: a row for every task of an array, instead of one for the array.
absl::Status GetJobs(CoordinatorClient& client, const std::string& labels, bool tasks,
                     Format format, Terminal& terminal);
absl::Status GetJob(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal);
// preempt, suspend, resume, hold, release and requeue, of a job or of all tasks of an array.
absl::Status ChangeJob(CoordinatorClient& client, CoordinatorClient::JobChange change,
                       const v1::ChangeJobRequest& request, Format format, Terminal& terminal);
// `ranks`: a number, or "auto".
absl::Status ResizeJob(CoordinatorClient& client, const std::string& name, const std::string& ranks,
                       const std::string& reason, Format format, Terminal& terminal);
absl::Status Cancel(CoordinatorClient& client, const std::string& name, Format format,
                    Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_JOBS_H_
