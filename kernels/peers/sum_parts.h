// The sum of what has arrived from other GPUs (parallel/comm/peer_group.h).
#ifndef MUSTER_KERNELS_PEERS_SUM_PARTS_H_
#define MUSTER_KERNELS_PEERS_SUM_PARTS_H_

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// SumParts (optimizer/reduce.h) over `in` [parts x n], except that part `own` is read from `mine`
// [n] and its place in `in` is not read. All of one dtype; `out` [n] may be `mine`.
void SumPartsWithOwn(Stream& stream, Tensor in, Tensor mine, int own, Tensor out);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_PEERS_SUM_PARTS_H_
