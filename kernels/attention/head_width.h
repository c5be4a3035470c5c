// Which widths of an attention head each kind of device takes, and by which kernels. Pure: callable
// where there is no GPU, to refuse a job before it is placed and to say which kernels it will get.
#ifndef MUSTER_KERNELS_ATTENTION_HEAD_WIDTH_H_
#define MUSTER_KERNELS_ATTENTION_HEAD_WIDTH_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// The widest head on CUDA: a tile of wider ones does not fit into shared memory. The host has no
// limit.
inline constexpr int64_t kCudaHeadWidthMax = 256;
// Of our kernels on the tensor cores, whose widths are multiples of kTensorCoreHeadWidthStep: rows
// are read 16 bytes at a time.
inline constexpr int64_t kTensorCoreHeadWidthMax = 128;
inline constexpr int64_t kTensorCoreHeadWidthStep = 8;

enum class AttentionPath {
  kHost,         // attention_cpu.cc
  kTensorCores,  // cuDNN's graphs, attention_*_hopper.cu and attention_flash.cu
  // attention.cu: fp32 arithmetic whatever the dtype, several times slower. A build with cuDNN
  // takes its graph first where it has one for the width.
  kCudaCores,
};

// "host", "tensor cores", "CUDA cores (slow)": for logs and plans.
const char* Name(AttentionPath path);

// The kernels that take heads of `head_width` columns in `dtype`, which is that of the activations.
// InvalidArgument, with the widths that would do: no kernel takes them.
absl::StatusOr<AttentionPath> AttentionPathOf(DeviceKind device, DType dtype, int64_t head_width);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_ATTENTION_HEAD_WIDTH_H_
