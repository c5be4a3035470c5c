// `muster profile`.
#ifndef MUSTER_CLI_PROFILE_H_
#define MUSTER_CLI_PROFILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"

namespace muster::cli {

struct ProfileOptions {
  std::string job;
  int32_t steps = 5;
  std::string output;  // empty: NAME.trace.json
};
// Makes every rank record the same steps to come, writes them as one Chrome trace with a process
// per rank, and prints where the time of a step went. kFailedPrecondition: the job does not train,
// ends too soon, or ended meanwhile. kNotFound: as GetJob.
absl::Status Profile(CoordinatorClient& client, const ProfileOptions& options, Format format,
                     Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PROFILE_H_
