#include "kernels/device/cuda_status.h"

#include <string>

#include "absl/strings/str_cat.h"

namespace muster::kernels::cuda {
namespace {

absl::StatusCode CodeOf(cudaError_t error) {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return absl::StatusCode::kResourceExhausted;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorDevicesUnavailable:
    case cudaErrorSystemNotReady:
    case cudaErrorECCUncorrectable:
    case cudaErrorNvlinkUncorrectable:
    case cudaErrorHardwareStackError:
    case cudaErrorContained:
      return absl::StatusCode::kUnavailable;
    case cudaErrorInsufficientDriver:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorUnsupportedPtxVersion:
      return absl::StatusCode::kFailedPrecondition;
    default:
      return absl::StatusCode::kInternal;
  }
}

}  // namespace

absl::Status CudaStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::Status(CodeOf(error), absl::StrCat(what, ": ", cudaGetErrorString(error), " (",
                                                  cudaGetErrorName(error), ")"));
}

absl::Status CublasStatus(cublasStatus_t error, absl::string_view what) {
  if (error == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  absl::StatusCode code = absl::StatusCode::kInternal;
  if (error == CUBLAS_STATUS_ALLOC_FAILED) code = absl::StatusCode::kResourceExhausted;
  if (error == CUBLAS_STATUS_NOT_SUPPORTED) code = absl::StatusCode::kUnimplemented;
  if (error == CUBLAS_STATUS_ARCH_MISMATCH) code = absl::StatusCode::kFailedPrecondition;
  return absl::Status(code, absl::StrCat(what, ": ", cublasLtGetStatusName(error)));
}

}  // namespace muster::kernels::cuda
