// What ranks tell each other before they make an NCCL communicator, and what must agree. Pure.
#ifndef MUSTER_PARALLEL_COMM_NCCL_PEERS_H_
#define MUSTER_PARALLEL_COMM_NCCL_PEERS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace muster::parallel {

struct NcclPeer {
  std::string version;  // of the library, "2.28.9"
  std::string device;   // "cuda:0 NVIDIA H200"
  std::string uuid;     // of the GPU
  std::string error;    // why this rank cannot take part; empty = it can

  std::string ToText() const;
  // An unreadable text becomes a peer with an error.
  static NcclPeer FromText(const std::string& text);
};

// The same answer on every rank. kFailedPrecondition names the ranks: one that cannot take part,
// one with another version than rank 0, two with the same GPU.
absl::Status CheckNcclPeers(const std::vector<NcclPeer>& by_rank);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_NCCL_PEERS_H_
