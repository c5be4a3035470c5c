#include "kernels/peers/meet_peers.h"

#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"

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
  // A block of a product, which takes nearly all of the shared memory, must find room beside this
  // kernel: how an SM splits memory between that and its cache cannot change while anything runs.
  // Each time, as it holds for the current device.
  RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(MeetPeersKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared),
      "asking for shared memory beside the meeting of peers"));
  MeetPeersKernel<<<1, kThreads, 0, stream>>>(counters, rank, size, value);
  return CudaStatus(cudaGetLastError(), "meeting the peers");
}

}  // namespace muster::kernels::cuda
