// Checks that the ops share (kernels/README.md: conventions). A violation is a bug of the caller
// and ends the process.
#ifndef MUSTER_KERNELS_CHECK_ARGS_H_
#define MUSTER_KERNELS_CHECK_ARGS_H_

#include <cstdint>
#include <initializer_list>

#include "kernels/tensor.h"

namespace muster::kernels {

// fp32, bf16 or fp16.
bool IsActivation(DType dtype);
// Contiguous, of this dtype and shape. `name` is the tensor's in messages.
void CheckIs(const char* name, const Tensor& x, DType dtype, std::initializer_list<int64_t> shape);
void CheckIsOrEmpty(const char* name, const Tensor& x, DType dtype,
                    std::initializer_list<int64_t> shape);
// [B,S,heads,D] with any strides, but a dense last dimension.
void CheckHeads(const char* name, const Tensor& x, DType dtype, int64_t batch, int64_t sequence,
                int64_t heads, int64_t width);
// fp32 and contiguous; the second with the same number of elements, too.
void CheckFp32(const Tensor& x);
void CheckSameFp32(const Tensor& x, const Tensor& y);
// The arguments of Rotary (attention/rotary.h).
void CheckRotary(const Tensor& x, const Tensor& table);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_CHECK_ARGS_H_
