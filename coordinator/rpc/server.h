// The gRPC server: services, health checks, reflection, limits, keepalive, and an orderly stop.
#ifndef MUSTER_COORDINATOR_RPC_SERVER_H_
#define MUSTER_COORDINATOR_RPC_SERVER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/limits.h"
#include "coordinator/rpc/gate.h"
#include "coordinator/rpc/slots.h"
#include "security/tls_files.h"

namespace muster::coordinator {

class Shell;

// Lifecycle: Start, Stop, destruction. Thread: one.
class RpcServer {
 public:
  struct Options {
    std::string listen;   // HOST:PORT; port 0 = the system picks
    std::string version;  // of this build
    // The port of an earlier start, at which clients and daemons still look for the coordinator. It
    // is tried first when `listen` leaves the port to the system. 0 = none.
    int earlier_port = 0;
    std::string backups;  // absolute path below which AdminService.Backup writes
    // A peer is pinged after this long without a byte from it, and its connection closed when the
    // answer takes as long again.
    absl::Duration keepalive = absl::Seconds(5);
    // A daemon's stream that has no Hello by then is closed.
    absl::Duration hello_timeout = kHelloTimeout;
    // Empty: callers are not asked who they are. Requires: passed security::CheckServerFiles.
    security::TlsFiles tls;
    GateOptions gate;  // `tls` and `ca` are set from the files above
    // A call with a single reply that takes so long is logged (call_log.h).
    absl::Duration slow_call = absl::Seconds(1);
    uint64_t trace_seed = 0;  // of the ids in these lines where the caller sent none
    // How many calls and streams are served at a time.
    Slots::Bounds slots = Slots::kDefaultBounds;
  };
  // `shell` outlives the server. kInvalidArgument: not HOST:PORT, or a file that callers are
  // checked with cannot be read. kUnavailable: the address cannot be bound, e.g. because another
  // process has it.
  static absl::StatusOr<std::unique_ptr<RpcServer>> Start(Shell& shell, const Options& options);
  virtual ~RpcServer() = default;

  // HOST:PORT with the port that was bound.
  virtual const std::string& address() const = 0;
  // Reports NOT_SERVING to health checks, drains the shell and ends every stream with UNAVAILABLE.
  // Calls that still run after `grace` are cancelled.
  virtual void Stop(absl::Duration grace) = 0;
};

// The port of HOST:PORT; kInvalidArgument names `address`.
absl::StatusOr<int> PortOf(const std::string& address);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_SERVER_H_
