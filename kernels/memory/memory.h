// Moving and adding up tensors, element by element. kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_MEMORY_MEMORY_H_
#define MUSTER_KERNELS_MEMORY_MEMORY_H_

#include <cstdint>
#include <vector>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

void Zero(Stream& stream, Tensor out);
// Of many small tensors in fp32, with few launches.
void ZeroAll(Stream& stream, const std::vector<Tensor>& outs);
// Same dtype and number of elements; either side in host or device memory.
void Copy(Stream& stream, Tensor from, Tensor to);
// Between fp32, bf16 and fp16.
void Cast(Stream& stream, Tensor from, Tensor to);
// y += alpha * x, fp32.
void Axpy(Stream& stream, float alpha, Tensor x, Tensor y);
// x *= alpha, fp32.
void Scale(Stream& stream, float alpha, Tensor x);
// to = from, or to += from with `accumulate` (summed in fp32, rounded once). Same shape, any
// strides (also negative ones), no overlap. Both are act, and may be two different dtypes.
void CopyStrided(Stream& stream, Tensor from, Tensor to, bool accumulate = false);
// out = a + b, act, any shape; out may alias either.
void Add(Stream& stream, Tensor a, Tensor b, Tensor out);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_MEMORY_MEMORY_H_
