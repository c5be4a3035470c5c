// NVIDIA's own libraries, loaded when the first CUDA device is made, so that one binary runs on
// machines with GPUs and on those without CUDA.
#ifndef MUSTER_KERNELS_DEVICE_NVIDIA_LIBRARIES_H_
#define MUSTER_KERNELS_DEVICE_NVIDIA_LIBRARIES_H_

#include "absl/status/status.h"

namespace muster::kernels::cuda {

// Call before any function of cuBLASLt. kFailedPrecondition says which library is missing, where it
// was searched for and what to install. Thread-safe; later calls are cheap.
absl::Status LoadCublasLt();
// The same for cuDNN, which needs NVRTC. Without them cudnnCreate fails, and attention runs on our
// own kernels.
absl::Status LoadCudnn();

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_DEVICE_NVIDIA_LIBRARIES_H_
