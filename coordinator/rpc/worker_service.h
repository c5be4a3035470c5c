// muster.v1.WorkerService on top of the shell: one stream per daemon.
#ifndef MUSTER_COORDINATOR_RPC_WORKER_SERVICE_H_
#define MUSTER_COORDINATOR_RPC_WORKER_SERVICE_H_

#include <memory>

namespace grpc {
class Service;
}

namespace muster::coordinator {

class Shell;

// `shell` outlives the server that serves this.
std::unique_ptr<grpc::Service> MakeWorkerService(Shell& shell);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_WORKER_SERVICE_H_
