#include "kernels/attention/head_width.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace muster::kernels {

const char* Name(AttentionPath path) {
  switch (path) {
    case AttentionPath::kHost:
      return "host";
    case AttentionPath::kTensorCores:
      return "tensor cores";
    case AttentionPath::kCudaCores:
      break;
  }
  return "CUDA cores (slow)";
}

absl::StatusOr<AttentionPath> AttentionPathOf(DeviceKind device, DType dtype, int64_t head_width) {
  if (head_width < 1) {
    return absl::InvalidArgumentError(absl::StrCat("heads are ", head_width, " columns wide"));
  }
  if (device == DeviceKind::kCpu) return AttentionPath::kHost;
  if (head_width > kCudaHeadWidthMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("heads are ", head_width, " columns wide; on CUDA attention takes at most ",
                     kCudaHeadWidthMax, ", and is fastest at multiples of ",
                     kTensorCoreHeadWidthStep, " up to ", kTensorCoreHeadWidthMax));
  }
  const bool tensor_cores = dtype != DType::kF32 && head_width <= kTensorCoreHeadWidthMax &&
                            head_width % kTensorCoreHeadWidthStep == 0;
  return tensor_cores ? AttentionPath::kTensorCores : AttentionPath::kCudaCores;
}

}  // namespace muster::kernels
