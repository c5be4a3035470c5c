#include "kernels/peers/peer_barrier.h"

#include "base/status_macros.h"
#include "kernels/device/cuda_status.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kThreads = 32;

__global__ void PeerBarrierKernel(volatile uint32_t* counters, int rank, int size, uint32_t value) {
  __threadfence_system();
  for (int peer = threadIdx.x; peer < size; peer += kThreads) {
    if (peer != rank) counters[(rank * size + peer) * kPeerBarrierStride] = value;
  }
  for (int peer = threadIdx.x; peer < size; peer += kThreads) {
    if (peer == rank) continue;
    while (static_cast<int32_t>(counters[(peer * size + rank) * kPeerBarrierStride] - value) < 0) {
      __nanosleep(200);
    }
  }
  __threadfence_system();
}

}  // namespace

absl::Status PeerBarrier(cudaStream_t stream, uint32_t* counters, int rank, int size,
                         uint32_t value) {
  // A block of a GEMM, which takes nearly all of the shared memory, must fit beside this kernel:
  // how a multiprocessor splits memory between shared memory and cache cannot change while anything
  // runs on it. The attribute is set each time because it holds for the current device.
  RETURN_IF_ERROR(CudaStatus(
      cudaFuncSetAttribute(PeerBarrierKernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                           cudaSharedmemCarveoutMaxShared),
      "reserving shared memory beside the peer barrier"));
  PeerBarrierKernel<<<1, kThreads, 0, stream>>>(counters, rank, size, value);
  return CudaStatus(cudaGetLastError(), "peer barrier");
}

}  // namespace muster::kernels::cuda
