// Descriptions of matrices for Hopper's TMA (CUDA driver API, tensor maps).
#ifndef MUSTER_KERNELS_CUDA_TENSOR_MAP_H_
#define MUSTER_KERNELS_CUDA_TENSOR_MAP_H_

#include <cuda.h>

#include "absl/status/status.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// Boxes of 64 columns, which are 128 bytes and swizzled as such, by `box_rows` rows (up to 256) of
// a row-major bf16 or fp16 matrix. Elements beyond its edges are read as zero. kUnimplemented: the
// driver has no tensor maps.
absl::Status DescribeBoxes(const Tensor& matrix, int box_rows, CUtensorMap& map);

// The same of one head of one sample of [B,S,heads,columns] with strides that are multiples of 16
// bytes: coordinates are column, head, row, sample.
absl::Status DescribeHeads(const Tensor& heads, int box_rows, CUtensorMap& map);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_TENSOR_MAP_H_
