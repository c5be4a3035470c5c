// RankService on the daemon's unix socket.
#ifndef MUSTER_WORKER_DAEMON_RANK_SERVER_H_
#define MUSTER_WORKER_DAEMON_RANK_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/daemon/core/events.h"

namespace muster::worker {

// Thread-safe. A call waits, without holding a thread, until Reply names it.
class RankServer {
 public:
  // Ends every waiting call with UNAVAILABLE: the rank repeats it to the next daemon.
  virtual ~RankServer() = default;
  // Hands RankCall and RankCallCancelled to `post`, on threads of gRPC. Replaces a socket file that
  // an earlier daemon left: the caller holds the lock of the state directory. kUnavailable names
  // the socket.
  static absl::StatusOr<std::unique_ptr<RankServer>> Start(const std::string& socket,
                                                           std::function<void(DaemonEvent)> post);
  virtual void Reply(ReplyToRank reply) = 0;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RANK_SERVER_H_
