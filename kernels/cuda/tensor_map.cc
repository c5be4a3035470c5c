#include "kernels/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "absl/strings/str_cat.h"

namespace muster::kernels::cuda {
namespace {

constexpr int kBoxColumns = 64;

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled FindEncodeTiled() {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault,
                                       &result) != cudaSuccess ||
      result != cudaDriverEntryPointSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(found);
}

// `pitch`: bytes from one element to the next along each dimension but the first.
absl::Status Describe(const Tensor& tensor, int rank, const cuuint64_t* sizes,
                      const cuuint64_t* pitch, const cuuint32_t* box, CUtensorMap& map) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) return absl::UnimplementedError("the driver has no tensor maps");
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map,
             tensor.dtype() == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             static_cast<cuuint32_t>(rank), tensor.data(), sizes, pitch, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a tensor map of ", tensor.ToString(), ": CUDA error ",
                                          static_cast<int>(result)));
}

}  // namespace

absl::Status DescribeBoxes(const Tensor& matrix, int box_rows, CUtensorMap& map) {
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.dim(1)),
                              static_cast<cuuint64_t>(matrix.dim(0))};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(matrix.dim(1) * SizeOf(matrix.dtype()))};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  return Describe(matrix, 2, sizes, pitch, box, map);
}

absl::Status DescribeHeads(const Tensor& heads, int box_rows, CUtensorMap& map) {
  constexpr int kDimensions[] = {3, 2, 1, 0};
  cuuint64_t sizes[4], pitch[3];
  for (int i = 0; i < 4; ++i) {
    sizes[i] = static_cast<cuuint64_t>(heads.dim(kDimensions[i]));
    if (i == 0) continue;
    // The stride of a dimension of one may be anything.
    const int64_t stride = sizes[i] == 1 ? kBoxColumns : heads.stride(kDimensions[i]);
    pitch[i - 1] = static_cast<cuuint64_t>(stride * SizeOf(heads.dtype()));
  }
  const cuuint32_t box[] = {kBoxColumns, 1, static_cast<cuuint32_t>(box_rows), 1};
  return Describe(heads, 4, sizes, pitch, box, map);
}

}  // namespace muster::kernels::cuda
