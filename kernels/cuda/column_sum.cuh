// Second stage of every sum over rows: partial results of the blocks, added in block order.
#ifndef MUSTER_KERNELS_CUDA_COLUMN_SUM_CUH_
#define MUSTER_KERNELS_CUDA_COLUMN_SUM_CUH_

#include <cstdint>

#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// first[c] += sum over p of partial[p][c], second[c] += ... of partial[p][columns + c], and a third
// likewise: the rows of `partial` hold `columns` values for each that is not nullptr. Without
// `accumulate` the first two are overwritten, without `accumulate_third` the third. The order
// depends on `partials` alone.
void AddPartials(CudaStream& stream, const float* partial, int64_t partials, int64_t columns,
                 bool accumulate, float* first, float* second, float* third = nullptr,
                 bool accumulate_third = false);

// out[c] += sum of x[:, c] (the bias gradient of a linear layer). x [T,N] act, out [N] fp32. Uses
// `scratch`, ColumnSumScratchBytes(...) of it.
void ColumnSum(CudaStream& stream, const Tensor& x, const Tensor& out, bool accumulate,
               void* scratch);
int64_t ColumnSumScratchBytes(const CudaDevice& device, int64_t rows, int64_t columns);
// Blocks that share the rows of such a sum when `column_blocks` of them share the columns.
int64_t ColumnSumBlocks(const CudaDevice& device, int64_t rows, int64_t column_blocks);

// The backward of an MLP's GELU in one pass over its tensors [T,N]: dx = dy gelu'(x) (dx may alias
// dy), y = gelu(x) unless empty, dbias[c] += sum of dx[:, c] unless empty. Uses `scratch` as
// ColumnSum does.
void GeluBackwardAndSum(CudaStream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx,
                        const Tensor& y, const Tensor& dbias, bool accumulate, void* scratch);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_COLUMN_SUM_CUH_
