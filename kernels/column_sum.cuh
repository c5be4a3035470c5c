// Second stage of every sum over rows: partial results of the blocks, added in block order.
#ifndef MUSTER_KERNELS_COLUMN_SUM_CUH_
#define MUSTER_KERNELS_COLUMN_SUM_CUH_

#include <cstdint>

#include "kernels/device_cuda.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// first[c] += sum over p of partial[p][c], second[c] += ... of partial[p][columns + c] (with
// `second` nullptr the rows of `partial` hold `columns` values, else twice that). The order depends
// on `partials` alone.
void AddPartials(CudaStream& stream, const float* partial, int64_t partials, int64_t columns,
                 float* first, float* second);

// out[c] += sum of x[:, c] (the bias gradient of a linear layer). x [T,N] act, out [N] fp32. Uses
// `scratch`, ColumnSumScratchBytes(...) of it.
void ColumnSum(CudaStream& stream, const Tensor& x, const Tensor& out, void* scratch);
int64_t ColumnSumScratchBytes(const CudaDevice& device, int64_t rows, int64_t columns);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_COLUMN_SUM_CUH_
