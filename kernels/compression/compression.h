// Compression of gradients for slow links: the largest elements (top-k) or the signs.
// kernels/README.md: conventions of all ops.
#ifndef MUSTER_KERNELS_COMPRESSION_COMPRESSION_H_
#define MUSTER_KERNELS_COMPRESSION_COMPRESSION_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// Removes the k elements of x with the largest magnitude: they become zero in x, and in `also`.
// Among equal magnitudes lower indices come first; NaN is larger than anything. They are written
// either as pairs of index (plus `offset`) and value, in ascending order of index, or to `dense` at
// their own places, with zeros between them. About six passes over x.
struct TakeLargestArgs {
  Tensor x;       // [n] fp32, updated
  Tensor also;    // [n] fp32, updated, or empty
  int64_t k = 0;  // 1 to n
  int64_t offset = 0;
  Tensor indices;  // [k] i32, and
  Tensor values;   // [k] fp32; or
  Tensor dense;    // [n] fp32
};
void TakeLargest(Stream& stream, const TakeLargestArgs& args);
// out[i] = the sum over parts of the value with index first + i, or 0 where a part has none, added
// in the order of SumParts: parts that hold every index give the bits of SumParts. entries
// [parts, 2, k] i32: the indices of a part, ascending, then its values (the bits of fp32).
void SumSparse(Stream& stream, Tensor entries, int64_t first, Tensor out);
// packed = the mean magnitude of x (the bits of an fp32 number), then a bit per element, 1 for
// negative; x -= mean * sign(x). packed [1 + ceil(n / 32)] i32.
void TakeSigns(Stream& stream, Tensor x, Tensor packed);
// out[i] = the sum over parts of +mean or -mean, by the sign of element first + i, added in the
// order of SumParts. packed [parts, 1 + ceil(n / 32)] i32; any stride between parts.
void SumSigns(Stream& stream, Tensor packed, int64_t first, Tensor out);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_COMPRESSION_COMPRESSION_H_
