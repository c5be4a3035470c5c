// Programmatic dependent launch (Hopper on): a kernel begins while the one before it in the stream
// ends. Its blocks are placed and set up when the kernel before allows it, and wait for that kernel
// where they first need its memory. Older devices run the kernels one after the other.
#ifndef MUSTER_KERNELS_CUDA_OVERLAP_CUH_
#define MUSTER_KERNELS_CUDA_OVERLAP_CUH_

#include <cstddef>

#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// Waits until everything that was enqueued before this kernel is done and its writes are visible.
// Every thread of an overlapped kernel calls it before it writes, and before it reads what the
// kernel before wrote.
__device__ inline void WaitForPreviousKernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may begin once every block has called this or ended. Called after
// WaitForPreviousKernel, so that all kernels before this one are done when the next one begins.
__device__ inline void LetNextKernelBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Whether the code of `kernel` that this device runs was compiled for Hopper or later. A device may
// run code that was compiled for an older one.
template <typename Kernel>
bool IsBuiltForHopper(Kernel* kernel) {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Requires: the kernel calls WaitForPreviousKernel.
template <typename... Parameters, typename... Arguments>
void LaunchOverlapped(CudaStream& stream, void (*kernel)(Parameters...), int64_t blocks,
                      int64_t threads, int64_t shared_bytes, Arguments... arguments) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream.handle();
  config.attrs = &attribute;
  config.numAttrs = IsBuiltForHopper(kernel) ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_OVERLAP_CUH_
