// Starts shims (shim.h) by forking a process that has the program loaded already: to load it anew,
// with the libraries that the daemon needs, takes more of a processor than a short command does
// (docs/decisions/0025-shims-are-forked.md).
//
//   daemon --socket--> shim server --fork--> shim --fork--> rank
//
// The server (`muster-worker shim-server`) has one thread and no state. It ends with the daemon's
// end of the socket; its shims go on, as those of a daemon that has ended do.
#ifndef MUSTER_WORKER_DAEMON_SHIM_SERVER_H_
#define MUSTER_WORKER_DAEMON_SHIM_SERVER_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/shim.h"

namespace muster::worker {

// The daemon's side. Thread: one.
class ShimServer {
 public:
  // `binary`: run as `BINARY shim-server`.
  explicit ShimServer(std::string binary) : binary_(std::move(binary)) {}
  ~ShimServer() { End(); }
  ShimServer(const ShimServer&) = delete;
  ShimServer& operator=(const ShimServer&) = delete;

  // Starts the server unless there is one. To be called early, so that it is the program that this
  // daemon is, whatever is installed meanwhile. kUnavailable names the program.
  absl::Status Start();

  // Has a shim forked, by a new server where the last one has ended, in a session of its own, that
  // inherits `socket` as kShimSocket and no other descriptor, no signal handler or mask, and has
  // the environment given. stdout and stderr go to shim.lock in its run directory. Returns its
  // pidfd, which is not valid when the shim has ended already; the server reaps it. kUnavailable:
  // the server cannot be started or does not answer; no shim was started, or it finds that nobody
  // waits at `socket` once the caller has closed it.
  absl::StatusOr<UniqueFd> Fork(const ShimOptions& shim,
                                const std::vector<std::string>& environment, int socket);

  pid_t pid() const { return pid_; }  // of the server; 0: none runs

 private:
  void End();

  const std::string binary_;
  pid_t pid_ = 0;
  UniqueFd socket_;
};

// The server's: forks until the daemon is gone. `argc` and `argv` of main, whose memory each shim
// writes its own command line to, for who lists processes. Returns the exit status. Requires: no
// other thread in the process.
int RunShimServer(int argc, char** argv, const ProgramsInside& inside);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SHIM_SERVER_H_
