// The device side of waiting for other GPUs of the host (parallel/comm/peer_memory.h).
#ifndef MUSTER_KERNELS_PEERS_MEET_PEERS_H_
#define MUSTER_KERNELS_PEERS_MEET_PEERS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// Words between the counters of two pairs of ranks: lines of the host's caches.
inline constexpr int kMeetStride = 16;

// Enqueues: what was enqueued before is visible to all devices; counter [rank, peer] of
// `counters`[size, size] (host memory as the device sees it) becomes `value` for every peer; waits
// until every counter [peer, rank] is `value` or later, in the order of a clock that turns over.
// One warp of one multiprocessor until then: for a stream that has nothing else to do.
absl::Status MeetPeers(cudaStream_t stream, uint32_t* counters, int rank, int size, uint32_t value);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_PEERS_MEET_PEERS_H_
