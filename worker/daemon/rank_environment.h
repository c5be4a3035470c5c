// The environment of a rank's shim (shim.h), and so of the rank.
#ifndef MUSTER_WORKER_DAEMON_RANK_ENVIRONMENT_H_
#define MUSTER_WORKER_DAEMON_RANK_ENVIRONMENT_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "muster/v1/rank.pb.h"
#include "security/accounts.h"

namespace muster::worker {

// "NAME=value" of each variable: this process's environment with what the rank of `assignment`
// needs: its thread count, the order of devices, its job, epoch and rank, and `secrets`, variables
// with their values; of an `account`, too, those that a login gives, and not what the daemon's own
// environment says of its keys and its session.
std::vector<std::string> RankEnvironment(const v1::RankAssignment& assignment,
                                         const std::map<std::string, std::string>& secrets,
                                         const std::optional<security::Account>& account);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RANK_ENVIRONMENT_H_
