// `muster events`.
#ifndef MUSTER_CLI_EVENTS_H_
#define MUSTER_CLI_EVENTS_H_

#include <string>

#include "absl/status/status.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"
#include "muster/v1/job.pb.h"

namespace muster::cli {

// One line of text: time, sequence, kind, what it is about, message.
std::string EventLine(const v1::Event& event);

// The events of a job, given by name or id, or of the whole cluster when `job` is empty. With
// `follow` it goes on with new events, across restarts of the coordinator.
absl::Status Events(CoordinatorClient& client, const std::string& job, bool follow, Format format,
                    Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_EVENTS_H_
