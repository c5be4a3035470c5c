// CUDA and cuBLAS results as absl::Status. The only place that maps their codes.
#ifndef MUSTER_KERNELS_DEVICE_CUDA_STATUS_H_
#define MUSTER_KERNELS_DEVICE_CUDA_STATUS_H_

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster::kernels::cuda {

// kResourceExhausted: out of device memory. kUnavailable: no driver, no device, or a device that
// must be reset (ECC, Xid, lost). kFailedPrecondition: driver older than the runtime, or no code
// for this architecture. kInternal: everything else, our bug. `what` says what was attempted.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);
// kUnimplemented: no algorithm for this shape and alignment; else as above.
absl::Status CublasStatus(cublasStatus_t error, absl::string_view what);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_DEVICE_CUDA_STATUS_H_
