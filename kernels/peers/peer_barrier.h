// A barrier between the GPUs of one host, on the device (parallel/comm/peer_counters.h).
#ifndef MUSTER_KERNELS_PEERS_PEER_BARRIER_H_
#define MUSTER_KERNELS_PEERS_PEER_BARRIER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// Words from the counter of one pair of ranks to that of the next: a cache line of the host each.
inline constexpr int kPeerBarrierStride = 16;

// Enqueues a barrier of `size` ranks. `counters` [size, size] are in host memory, as this device
// sees it. What was enqueued before becomes visible to all devices; then counter [rank, peer] of
// every peer becomes `value`; then the stream waits until every counter [peer, rank] is `value` or
// later (modulo 2^32). One warp of one multiprocessor waits, so the stream has nothing else to do.
absl::Status PeerBarrier(cudaStream_t stream, uint32_t* counters, int rank, int size,
                         uint32_t value);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_PEERS_PEER_BARRIER_H_
