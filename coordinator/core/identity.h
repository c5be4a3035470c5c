// Which state the coordinator serves.
#ifndef MUSTER_COORDINATOR_CORE_IDENTITY_H_
#define MUSTER_COORDINATOR_CORE_IDENTITY_H_

#include <cstdint>
#include <string>

namespace muster::coordinator {

struct Identity {
  std::string cluster_id;
  std::string history_id;    // FromCoordinator.history_id
  uint64_t leader_term = 0;  // of this coordinator; 0 before its first turn in a new cluster
};

// Of the histories of two copies of a cluster's state, or of what began in them. A version that
// had none says nothing.
inline bool Differ(const std::string& history, const std::string& other) {
  return !history.empty() && !other.empty() && history != other;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_IDENTITY_H_
