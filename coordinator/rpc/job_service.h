// muster.v1.JobService on top of the shell: checks requests, passes them on, fills in responses.
#ifndef MUSTER_COORDINATOR_RPC_JOB_SERVICE_H_
#define MUSTER_COORDINATOR_RPC_JOB_SERVICE_H_

#include <memory>
#include <string>

namespace grpc {
class Service;
}

namespace muster::coordinator {

class Gate;
class Shell;

// `shell` and `gate` outlive the server that serves this. `version` is what GetVersion returns.
std::unique_ptr<grpc::Service> MakeJobService(Shell& shell, Gate& gate, const std::string& version);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_JOB_SERVICE_H_
