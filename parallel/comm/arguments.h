// What every backend of Communicator requires of its caller. A breach is our bug, hence CHECK.
#ifndef MUSTER_PARALLEL_COMM_ARGUMENTS_H_
#define MUSTER_PARALLEL_COMM_ARGUMENTS_H_

#include <cstdint>
#include <vector>

#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// Elements of each of the `size` equal parts of `data`, which must be contiguous.
int64_t EqualPart(const kernels::Tensor& data, int size);
void CheckBroadcast(const kernels::Tensor& data, int root, int size);
// Returns EqualPart of both.
int64_t CheckAllToAll(const kernels::Tensor& in, const kernels::Tensor& out, int size);
// Returns the elements of `in` of all items.
int64_t CheckAllToAllBatch(const std::vector<AllToAllItem>& items, int size);
// For a send or receive between `rank` and `peer`.
void CheckPeer(const kernels::Tensor& data, int peer, int rank, int size);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_ARGUMENTS_H_
