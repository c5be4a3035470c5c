// RankService on the daemon's unix socket.
#ifndef MUSTER_WORKER_DAEMON_RANK_SERVER_H_
#define MUSTER_WORKER_DAEMON_RANK_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/daemon/daemon_core.h"

namespace muster::worker {

// Thread-safe. Calls wait, without a thread each, until Reply names them.
class RankServer {
 public:
  // Ends every waiting call with UNAVAILABLE: the rank repeats it to the next daemon.
  virtual ~RankServer() = default;
  // `post` gets RankCall and RankCallCancelled, on threads of gRPC. A socket file that is left over
  // is replaced: the caller holds the lock of the state directory. kUnavailable names the socket.
  static absl::StatusOr<std::unique_ptr<RankServer>> Start(const std::string& socket,
                                                           std::function<void(DaemonEvent)> post);
  virtual void Reply(ReplyToRank reply) = 0;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RANK_SERVER_H_
