// Collectives between the GPUs of one host by their copy engines. NCCL's kernels hold some of the
// multiprocessors while they wait and copy; a GEMM beside them, made of one long-lived block per
// multiprocessor, then takes up to twice as long, because the blocks that found no multiprocessor
// begin when the others end. Copy engines leave all multiprocessors to the GEMMs; the only kernel
// left is the one that sums what has arrived
// (docs/decisions/0005-copy-engines-carry-large-collectives.md).
//
// Every rank pulls from the others, first from the next rank: all pairs of a step are different,
// and all links of a switch are busy both ways. Where a pair of GPUs has all links of both (a
// switch), one pull after the other is fastest; where it has some of them, several at once
// (PeerRegions::pulls_at_once). Sums are made as one binary tree over the ranks in order, in fp32:
// the bits of the local and TCP communicators.
#ifndef MUSTER_PARALLEL_COMM_PEER_GROUP_H_
#define MUSTER_PARALLEL_COMM_PEER_GROUP_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/peer_counters.h"
#include "parallel/comm/peer_regions.h"

namespace muster::parallel {

// The calls of one communicator by copy engines. They are those of Communicator, with what they
// require; besides, all ranks pass data at the same place of a region of the same size. Used by the
// thread that enqueues.
class PeerGroup {
 public:
  // `world_ranks`: the world's rank of each rank of the group, in order.
  PeerGroup(std::shared_ptr<PeerRegions> regions, std::unique_ptr<PeerCounters> counters,
            std::vector<int> world_ranks, int rank);
  ~PeerGroup();

  const std::vector<int>& world_ranks() const { return world_ranks_; }
  const kernels::Tensor& sums() const { return sums_; }
  void UseForSums(const kernels::Tensor& memory) { sums_ = memory; }
  void WaitInWarp(bool in_warp) { in_warp_ = in_warp; }
  // Whether the calls below can carry this data: the other ranks share it, and it has
  // ShareOptions::least_bytes. The same on all ranks.
  bool Covers(const kernels::Tensor& data) const;
  // The same of all that a batch of all-to-alls sends.
  bool Covers(const std::vector<AllToAllItem>& items) const;
  // The same of one part of as many as there are ranks.
  bool CoversPart(const kernels::Tensor& part) const;
  // Whether they can also sum it: its type is one that is summed here, and there is memory for the
  // other ranks' parts.
  bool CoversSum(const kernels::Tensor& data, ReduceOp op) const;

  absl::Status AllReduce(kernels::Stream& stream, const kernels::Tensor& data);
  // `sum` may be anywhere on the device. Open: other ranks may still read `data` when the stream
  // goes on (Communicator::ReduceScatterBeforeGather), until the next call or Close.
  absl::Status ReduceScatter(kernels::Stream& stream, const kernels::Tensor& data,
                             const kernels::Tensor& sum, bool open = false);
  absl::Status AllGather(kernels::Stream& stream, const kernels::Tensor& data);
  // `out` may be anywhere on the device.
  absl::Status AllGatherFrom(kernels::Stream& stream, const kernels::Tensor& in,
                             const kernels::Tensor& out);
  // `out` may be anywhere on the device.
  absl::Status AllToAll(kernels::Stream& stream, const kernels::Tensor& in,
                        const kernels::Tensor& out);
  absl::Status AllToAllBatch(kernels::Stream& stream, const std::vector<AllToAllItem>& items);
  absl::Status AllGatherInSteps(kernels::Stream& stream, const kernels::Tensor& in,
                                const kernels::Tensor& out,
                                absl::FunctionRef<void(int from)> arrived);
  absl::Status AllToAllInSteps(kernels::Stream& stream, const kernels::Tensor& in,
                               const kernels::Tensor& out, absl::FunctionRef<void(int to)> before);
  absl::Status Rotate(kernels::Stream& stream, const kernels::Tensor& in,
                      const kernels::Tensor& out, int by);
  // Ends an open reduce-scatter, if there is one: enqueues the barrier that the next call would.
  // Before a call of the group that does not come here.
  absl::Status Close(kernels::Stream& stream);
  // Ends the waits under way (PeerCounters::Release). Thread-safe.
  void Release() { counters_->Release(); }

 private:
  int size() const { return static_cast<int>(world_ranks_.size()); }
  // Work between the two runs after all ranks have come, and before any goes on. An open End leaves
  // the second barrier to the next Begin or Close.
  absl::Status Begin(kernels::Stream& stream);
  absl::Status End(kernels::Stream& stream, bool open = false);
  absl::Status Barrier(kernels::Stream& stream);
  // Copies what rank `of` of the group has where this rank has `mine`.
  struct Copy {
    int of = 0;
    const void* mine = nullptr;
    void* to = nullptr;
    int64_t bytes = 0;
  };
  // Enqueues the copies, those from peers as many at a time as is fastest.
  absl::Status Pull(kernels::Stream& stream, const std::vector<Copy>& copies);
  absl::Status MakeLanes();
  // Sums over the ranks the elements of `data` from `begin` on, as many as `sum` has.
  absl::Status SumPart(kernels::Stream& stream, const kernels::Tensor& data, int64_t begin,
                       const kernels::Tensor& sum);

  const std::shared_ptr<PeerRegions> regions_;
  const std::unique_ptr<PeerCounters> counters_;
  const std::vector<int> world_ranks_;
  const int rank_;
  kernels::Tensor sums_;  // where other ranks' parts arrive; may be empty
  bool in_warp_ = false;
  bool open_ = false;
  // A stream beside that of a call, for copies at the same time, and the event of its end.
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t ended = nullptr;
  };
  std::vector<Lane> lanes_;
  cudaEvent_t begun_ = nullptr;
  // The last call's stream and the event of its end: the counters take one call after the other.
  cudaStream_t last_ = nullptr;
  cudaEvent_t ended_ = nullptr;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_GROUP_H_
