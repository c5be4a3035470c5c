// muster.v1.WorkerService on top of the shell: one stream per daemon.
#ifndef MUSTER_COORDINATOR_RPC_WORKER_SERVICE_H_
#define MUSTER_COORDINATOR_RPC_WORKER_SERVICE_H_

#include <memory>

#include "absl/time/time.h"

namespace grpc {
class Service;
}

namespace muster::coordinator {

class Gate;
class Shell;

// `shell` and `gate` outlive the server that serves this. A stream without a Hello is closed after
// `hello_timeout`.
std::unique_ptr<grpc::Service> MakeWorkerService(Shell& shell, Gate& gate,
                                                 absl::Duration hello_timeout);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_WORKER_SERVICE_H_
