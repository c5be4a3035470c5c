// How many reads of other GPUs' memory at the same time are best, by measurement.
#ifndef MUSTER_PARALLEL_COMM_PEER_PULLS_H_
#define MUSTER_PARALLEL_COMM_PEER_PULLS_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

inline constexpr int kPullsMax = 4;

// 1 or kPullsMax, the same on every rank of `host`: a collective, blocks for some milliseconds.
// All ranks read at the same time, as in a collective, `bytes` of each of their `peers` (memory of
// other devices, in the order in which collectives read it). How much reads of several peers
// disturb each other depends on what is between the GPUs: on four H200 behind switches three reads
// at once bring 238 GB/s, one read of one pair alone 367
// (docs/decisions/0005-copy-engines-carry-large-collectives.md). kPullsMax where that is clearly
// faster; 1 where a rank could not time it, for want of memory, say. The current device is this
// rank's.
absl::StatusOr<int> FastestPulls(Communicator& host, const std::vector<const char*>& peers,
                                 int64_t bytes);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_PULLS_H_
