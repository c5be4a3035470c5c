// Functions of the CUDA driver, found at run time: a binary starts where there is no driver.
#ifndef MUSTER_PARALLEL_COMM_PEER_DRIVER_H_
#define MUSTER_PARALLEL_COMM_PEER_DRIVER_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace muster::parallel {

// Null where the driver does not have it.
template <typename F>
F DriverFunction(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result) !=
          cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<F>(found);
}

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_DRIVER_H_
