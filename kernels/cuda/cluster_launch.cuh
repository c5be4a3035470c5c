// Launches of kernels whose blocks form clusters (Hopper on).
#ifndef MUSTER_KERNELS_CUDA_CLUSTER_LAUNCH_CUH_
#define MUSTER_KERNELS_CUDA_CLUSTER_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// `clusters` of `size` blocks, which may take `shared_bytes` of dynamic shared memory each.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchClusters(CudaStream& stream, void (*kernel)(Parameters...), int64_t clusters,
                           int size, int threads, int64_t shared_bytes,
                           const Arguments&... arguments) {
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return error;
  cudaLaunchAttribute cluster = {};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(size);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(clusters * size));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream.handle();
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_CLUSTER_LAUNCH_CUH_
