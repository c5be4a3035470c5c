// What the host backends of Communicator have in common: how data is cut into parts, how parts are
// reduced in a fixed order, and what an algorithm sends. Pure.
#ifndef MUSTER_PARALLEL_COMM_COLLECTIVE_PLAN_H_
#define MUSTER_PARALLEL_COMM_COLLECTIVE_PLAN_H_

#include <cstdint>

#include "absl/types/span.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// Elements [begin, end) of a tensor.
struct PartRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t count() const { return end - begin; }
};

// Part `part` of `elements`, which are cut into `parts` of whole cache lines (16 elements), as
// evenly as that allows; the last parts may be shorter or empty.
PartRange PartOf(int64_t elements, int parts, int part);

// An all-reduce of at most this many bytes sends everything to everyone (one round trip) instead of
// reduce-scatter and all-gather (two). The bits are the same.
inline constexpr int64_t kOneRoundBytesMax = 8192;
// A broadcast among more than two ranks of more than this many bytes is a scatter followed by an
// all-gather, so that the root does not send everything to everyone.
inline constexpr int64_t kFlatBroadcastBytesMax = 65536;
bool BroadcastsInParts(int64_t bytes, int size);

// Bytes that rank `rank` sends in an all-reduce, and in a broadcast, of this many elements.
int64_t AllReduceBytes(int64_t elements, int64_t element_bytes, int size, int rank);
int64_t BroadcastBytes(int64_t elements, int64_t element_bytes, int size, int rank, int root);

// out[i] = op over inputs[0][i], inputs[1][i], ..., as one binary tree whose leaves are in that
// order: ((0 1) (2 3)) ((4 5) 6). Floating-point sums accumulate in fp32 and are rounded to storage
// once at the end (to nearest even). `out` may alias any of the inputs.
void ReduceAsTree(absl::Span<const void* const> inputs, kernels::DType dtype, ReduceOp op,
                  int64_t count, void* out);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_COLLECTIVE_PLAN_H_
