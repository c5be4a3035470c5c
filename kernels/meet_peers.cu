#include "kernels/meet_peers.h"

#include "kernels/cuda_status.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 32;

__global__ void MeetPeersKernel(volatile uint32_t* counters, int rank, int size, uint32_t value) {
  __threadfence_system();
  for (int peer = threadIdx.x; peer < size; peer += kThreads) {
    if (peer != rank) counters[(rank * size + peer) * kMeetStride] = value;
  }
  for (int peer = threadIdx.x; peer < size; peer += kThreads) {
    if (peer == rank) continue;
    while (static_cast<int32_t>(counters[(peer * size + rank) * kMeetStride] - value) < 0) {
      __nanosleep(200);
    }
  }
  __threadfence_system();
}

}  // namespace

absl::Status MeetPeers(cudaStream_t stream, uint32_t* counters, int rank, int size,
                       uint32_t value) {
  MeetPeersKernel<<<1, kThreads, 0, stream>>>(counters, rank, size, value);
  return CudaStatus(cudaGetLastError(), "meeting the peers");
}

}  // namespace muster::kernels::cuda
