#include "kernels/tensor_map.h"

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

}  // namespace

absl::Status DescribeBoxes(const Tensor& matrix, int box_rows, CUtensorMap& map) {
  static const EncodeTiled encode = FindEncodeTiled();
  if (encode == nullptr) return absl::UnimplementedError("the driver has no tensor maps");
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(matrix.dim(1)),
                              static_cast<cuuint64_t>(matrix.dim(0))};
  const cuuint64_t pitch[] = {static_cast<cuuint64_t>(matrix.dim(1) * SizeOf(matrix.dtype()))};
  const cuuint32_t box[] = {kBoxColumns, static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[] = {1, 1};
  const CUresult result =
      encode(&map,
             matrix.dtype() == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                            : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             2, matrix.data(), sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("a tensor map of ", matrix.ToString(), ": CUDA error ",
                                          static_cast<int>(result)));
}

}  // namespace muster::kernels::cuda
