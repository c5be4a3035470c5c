// NVIDIA's own libraries, loaded when the first CUDA device is made, so that one binary runs on
// machines with GPUs and on those without CUDA.
#ifndef MUSTER_KERNELS_DEVICE_NVIDIA_LIBRARIES_H_
#define MUSTER_KERNELS_DEVICE_NVIDIA_LIBRARIES_H_

#include "absl/status/status.h"

namespace muster::kernels::cuda {

// Before any call of cuBLASLt. kFailedPrecondition says which library is missing, where it was
// looked for and what to install. Thread-safe; later calls are cheap.
absl::Status LoadCublasLt();
// As above for cuDNN, and NVRTC with it. Without it cudnnCreate fails, and our own attention
// kernels serve.
absl::Status LoadCudnn();

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_DEVICE_NVIDIA_LIBRARIES_H_
