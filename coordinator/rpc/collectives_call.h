// JobService.GetCollectives: a record that a rank makes when it is asked for one.
#ifndef MUSTER_COORDINATOR_RPC_COLLECTIVES_CALL_H_
#define MUSTER_COORDINATOR_RPC_COLLECTIVES_CALL_H_

#include <grpcpp/support/server_callback.h>

#include "coordinator/rpc/gate.h"
#include "coordinator/shell.h"
#include "muster/v1/job_service.pb.h"

namespace muster::coordinator {

// The reactor owns itself until the call is done. `shell` outlives it, `response` lives as long as
// the call. `permit`: what the call holds, or why it has none and is refused. job_service.proto has
// the errors.
grpc::ServerUnaryReactor* StartCollectivesCall(Shell& shell,
                                               const v1::GetCollectivesRequest& request,
                                               v1::GetCollectivesResponse& response,
                                               absl::StatusOr<Permit> permit);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_COLLECTIVES_CALL_H_
