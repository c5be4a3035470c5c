// The sum of parts that have arrived from other GPUs (parallel/comm/peer_group.h).
#ifndef MUSTER_KERNELS_PEERS_SUM_PARTS_H_
#define MUSTER_KERNELS_PEERS_SUM_PARTS_H_

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels::cuda {

// SumParts (kernels/ops.h) of `in` [parts x n], of which part `own` stands in `mine` [n] instead,
// of the same type: what is in `in` in its place is not read. `out` [n], of that type, may be
// `mine`.
void SumPartsWithOwn(Stream& stream, Tensor in, Tensor mine, int own, Tensor out);

}  // namespace muster::kernels::cuda

#endif  // MUSTER_KERNELS_PEERS_SUM_PARTS_H_
