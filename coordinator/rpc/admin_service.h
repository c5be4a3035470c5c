// AdminService of admin_service.proto.
#ifndef MUSTER_COORDINATOR_RPC_ADMIN_SERVICE_H_
#define MUSTER_COORDINATOR_RPC_ADMIN_SERVICE_H_

#include <memory>
#include <string>

namespace grpc {
class Service;
}

namespace muster::coordinator {

class Gate;
class Shell;

// `shell` and `gate` outlive the service. Backups are written below `backups`, an absolute path;
// beside it is a directory for snapshots that are being read.
std::unique_ptr<grpc::Service> MakeAdminService(Shell& shell, Gate& gate,
                                                const std::string& backups);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_ADMIN_SERVICE_H_
