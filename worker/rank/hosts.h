// Where the ranks of an attempt run, as every rank sees it: which of them share a host, and which
// axes of the mesh cross from one host to another.
#ifndef MUSTER_WORKER_RANK_HOSTS_H_
#define MUSTER_WORKER_RANK_HOSTS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"
#include "parallel/mesh/mesh.h"

namespace muster::worker {

// The host that one rank runs on.
struct RankHost {
  std::string worker;
  std::string host;      // name of the machine
  std::string address;   // numeric IP at which other ranks reach it
  std::string identity;  // ranks of equal identity share memory and GPU links
};

// This rank's own host. The identity is NCCL_HOSTID where that is set, else the host id that the
// daemon gave it, else the machine's boot id.
RankHost HostOf(const v1::RankAssignment& assignment);

// The hosts of all ranks, in rank order. A collective of all ranks. Status codes: the
// communicator's.
absl::StatusOr<std::vector<RankHost>> GatherHosts(parallel::Communicator& world,
                                                  kernels::Device& device, const RankHost& own);

// How many hosts there are.
int HostCount(const std::vector<RankHost>& ranks);
// One line per host: "host a (worker-1, 10.0.0.1): ranks 0-3".
std::vector<std::string> HostTable(const std::vector<RankHost>& ranks);
// The axes along which some group has ranks on several hosts.
std::vector<parallel::Axis> AxesAcrossHosts(const parallel::Mesh& mesh,
                                            const std::vector<RankHost>& ranks);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_HOSTS_H_
