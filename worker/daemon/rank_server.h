// RankService on the daemon's unix socket.
#ifndef MUSTER_WORKER_DAEMON_RANK_SERVER_H_
#define MUSTER_WORKER_DAEMON_RANK_SERVER_H_

#include <sys/types.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/daemon/core/events.h"

namespace muster::worker {

// Thread-safe. A call waits, without holding a thread, until Reply names it.
class RankServer {
 public:
  // Connections of one account that are open at a time; more wait until one is closed. A rank has
  // one, and a machine has far fewer ranks.
  static constexpr int kUserConnectionsMax = 256;

  // Ends every waiting call with UNAVAILABLE: the rank repeats it to the next daemon.
  virtual ~RankServer() = default;
  // Hands RankCall and RankCallCancelled to `post`, on threads of gRPC. `attempts_directory` tells
  // which ranks are of which account (rank_files.h).
  static std::unique_ptr<RankServer> Make(std::string attempts_directory,
                                          std::function<void(DaemonEvent)> post);
  // For ranks of the daemon's own user. Replaces a socket file that an earlier daemon left: the
  // caller holds the lock of the state directory. kUnavailable names the socket.
  virtual absl::Status Listen(const std::string& socket) = 0;
  // Listens for ranks of this account, unless it does already, and returns the path:
  // USERS_DIRECTORY/UID/rank.sock, which is the account's, of mode 0600. A connection of another
  // user is closed, and a call about a rank that is not this account's is refused with
  // PERMISSION_DENIED. kUnavailable names the socket.
  virtual absl::StatusOr<std::string> ListenForUser(const std::string& users_directory, uid_t uid,
                                                    gid_t gid) = 0;
  virtual void Reply(ReplyToRank reply) = 0;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RANK_SERVER_H_
