// `muster version`.
#ifndef MUSTER_CLI_VERSION_H_
#define MUSTER_CLI_VERSION_H_

#include <string>

#include "absl/status/statusor.h"
#include "cli/output.h"
#include "muster/v1/job_service.pb.h"

namespace muster::cli {

// Prints the versions of this program and of the coordinator, or why the coordinator's is not
// known.
void PrintVersions(const std::string& client,
                   const absl::StatusOr<v1::GetVersionResponse>& coordinator, Format format,
                   Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_VERSION_H_
