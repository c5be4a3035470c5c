// KEDA's external scaler: how many workers of a group are wanted (wanted_workers.h).
#ifndef MUSTER_COORDINATOR_RPC_EXTERNAL_SCALER_H_
#define MUSTER_COORDINATOR_RPC_EXTERNAL_SCALER_H_

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "coordinator/rpc/gate.h"

namespace muster::coordinator {

class Shell;

// The metric `workers` with a target of 1, so that its value is the number of pods. `shell` and
// `gate` outlive the service.
std::unique_ptr<grpc::Service> MakeExternalScaler(Shell& shell, Gate& gate);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_EXTERNAL_SCALER_H_
