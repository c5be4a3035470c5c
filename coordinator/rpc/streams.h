// The streams that clients read: events, one job, one rank's log or trace. Each is pulled: one
// message is in flight, and the next is made from what is durable when the client has taken the
// last. A slow reader therefore costs one message of memory, and gets the newest state, not every
// change.
#ifndef MUSTER_COORDINATOR_RPC_STREAMS_H_
#define MUSTER_COORDINATOR_RPC_STREAMS_H_

#include <grpcpp/support/server_callback.h>

#include "coordinator/rpc/gate.h"
#include "coordinator/shell.h"
#include "muster/v1/admin_service.pb.h"
#include "muster/v1/job_service.pb.h"

namespace muster::coordinator {

// The reactors own themselves until their call is done. `shell` outlives them.
// `permit`: what the stream holds, or why it has none and is refused. job_service.proto has the
// errors.
grpc::ServerWriteReactor<v1::Event>* StartEventStream(Shell& shell,
                                                      const v1::WatchEventsRequest& request,
                                                      absl::StatusOr<Permit> permit);
grpc::ServerWriteReactor<v1::Job>* StartJobStream(Shell& shell, const v1::GetJobRequest& request,
                                                  absl::StatusOr<Permit> permit);
grpc::ServerWriteReactor<v1::LogChunk>* StartLogStream(Shell& shell,
                                                       const v1::GetLogsRequest& request,
                                                       absl::StatusOr<Permit> permit);
grpc::ServerWriteReactor<v1::ProfileChunk>* StartProfileStream(Shell& shell,
                                                               const v1::GetProfileRequest& request,
                                                               absl::StatusOr<Permit> permit);
// `directory`: where a copy of the state may lie for as long as it is read.
grpc::ServerWriteReactor<v1::SnapshotChunk>* StartSnapshotStream(Shell& shell,
                                                                 const std::string& directory,
                                                                 absl::StatusOr<Permit> permit);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_STREAMS_H_
