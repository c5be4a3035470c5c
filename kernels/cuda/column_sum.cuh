// Sums over the rows of a matrix: a first kernel leaves partial sums of its blocks, and a second
// adds them in block order.
#ifndef MUSTER_KERNELS_CUDA_COLUMN_SUM_CUH_
#define MUSTER_KERNELS_CUDA_COLUMN_SUM_CUH_

#include <cstdint>

#include "kernels/device/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// The second kernel: first[c] += sum over p of partial[p][c], second[c] += sum of
// partial[p][columns + c], and third[c] likewise. A row of `partial` holds `columns` values for
// each output that is not nullptr. Without `accumulate` the first two are overwritten, without
// `accumulate_third` the third. The order depends on `partials` alone.
void AddPartials(CudaStream& stream, const float* partial, int64_t partials, int64_t columns,
                 bool accumulate, float* first, float* second, float* third = nullptr,
                 bool accumulate_third = false);

// out[c] += sum of x[:, c] (the bias gradient of a linear layer). x [T,N] act, out [N] fp32. Uses
// `scratch`, ColumnSumScratchBytes(...) of it.
void ColumnSum(CudaStream& stream, const Tensor& x, const Tensor& out, bool accumulate,
               void* scratch);
int64_t ColumnSumScratchBytes(const CudaDevice& device, int64_t rows, int64_t columns);
// How many blocks divide the rows of such a sum when `column_blocks` blocks divide the columns.
int64_t ColumnSumBlocks(const CudaDevice& device, int64_t rows, int64_t column_blocks);

// The backward of an MLP's GELU in one pass over its tensors [T,N]: dx = dy gelu'(x) (dx may alias
// dy), y = gelu(x) unless empty, dbias[c] += sum of dx[:, c] unless empty. Uses `scratch` as
// ColumnSum does.
void GeluBackwardAndSum(CudaStream& stream, const Tensor& x, const Tensor& dy, const Tensor& dx,
                        const Tensor& y, const Tensor& dbias, bool accumulate, void* scratch);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_CUDA_COLUMN_SUM_CUH_
