// Starting the supervisor of a rank (shim.h) as a child process.
#ifndef MUSTER_WORKER_DAEMON_SPAWN_SHIM_H_
#define MUSTER_WORKER_DAEMON_SPAWN_SHIM_H_

#include <sys/types.h>

#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "muster/v1/rank.pb.h"
#include "security/accounts.h"
#include "worker/daemon/shim.h"

namespace muster::worker {

// Runs `binary shim ...` in a session of its own. It inherits `socket` as kShimSocket and no other
// descriptor, no signal handler or mask, and this process's environment with what the rank of
// `assignment` needs: its thread count, the order of devices, its job, epoch and rank, and
// `secrets`, variables with their values; of an `account`, too, those that a login gives, and not
// what the daemon's own environment says of its keys and its session. stdout and stderr go to
// shim.log in the run directory. Returns the process id, which the caller has to reap. kUnavailable
// names the program.
absl::StatusOr<pid_t> SpawnShim(const std::string& binary, const ShimOptions& shim, int socket,
                                const v1::RankAssignment& assignment,
                                const std::map<std::string, std::string>& secrets,
                                const std::optional<security::Account>& account);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_SPAWN_SHIM_H_
