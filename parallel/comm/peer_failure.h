// Which rank a communicator could not reach, carried by a status as a payload. A network that fails
// between two hosts is the fault of neither rank, and the next attempt is placed by which two they
// were.
#ifndef MUSTER_PARALLEL_COMM_PEER_FAILURE_H_
#define MUSTER_PARALLEL_COMM_PEER_FAILURE_H_

#include <optional>

#include "absl/status/status.h"

namespace muster::parallel {

struct PeerFailure {
  enum class Kind {
    kUnreachable,  // before the first collective: the two have never been able to talk
    kLost,         // nothing came from the peer's host for longer than links bridge
  };
  Kind kind = Kind::kLost;
  int rank = 0;  // of the peer, in the world
};

// Adds the failure to the status; a failure that it has already stays. OK stays OK.
absl::Status MarkPeer(absl::Status status, const PeerFailure& failure);
std::optional<PeerFailure> PeerFailureOf(const absl::Status& status);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_FAILURE_H_
