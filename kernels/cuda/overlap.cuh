// Kernels that begin while the one in front of them in the stream ends (programmatic dependent
// launch, Hopper on): their blocks are placed and set up when it lets them, and wait for its memory
// where they first need it. Older devices run them one after the other.
#ifndef MUSTER_KERNELS_CUDA_OVERLAP_CUH_
#define MUSTER_KERNELS_CUDA_OVERLAP_CUH_

#include <cstddef>

#include "kernels/device/device_cuda.h"

namespace muster::kernels::cuda {

// Until everything that was enqueued in front of this kernel is done and its memory seen. Every
// thread of an overlapped kernel calls it before it writes, and before it reads what the kernel in
// front wrote.
__device__ inline void WaitForKernelInFront() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel may begin, once every block has come here or ended. Behind
// WaitForKernelInFront, so that what lies further in front is done when the next kernel begins.
__device__ inline void LetNextKernelBegin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Whether the code that this device runs of `kernel` was compiled for Hopper or later: a later
// device may run what was compiled for an older one.
template <typename Kernel>
bool IsBuiltForHopper(Kernel* kernel) {
  cudaFuncAttributes attributes = {};
  return cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess && attributes.ptxVersion >= 90;
}

// Requires: the kernel calls WaitForKernelInFront.
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
