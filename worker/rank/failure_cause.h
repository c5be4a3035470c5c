// What a failure of the engine means to the control plane, for exit.pb.
#ifndef MUSTER_WORKER_RANK_FAILURE_CAUSE_H_
#define MUSTER_WORKER_RANK_FAILURE_CAUSE_H_

#include <optional>

#include "absl/status/status.h"
#include "muster/v1/job.pb.h"

namespace muster::worker {

// By the status's peer failure (parallel/comm/peer_failure.h): network when the connection to a
// peer was lost, launch when it was never made. Else by its FailureDomain
// (parallel/train/failure.h). Unknown when it has neither.
v1::Cause CauseOf(const absl::Status& status);

// The rank that could not be reached, when that is the failure.
std::optional<int> UnreachablePeerOf(const absl::Status& status);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_FAILURE_CAUSE_H_
