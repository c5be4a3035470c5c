// What a communicator between GPUs of one host may offer beside its collectives: ranks read each
// other's device memory, so that large collectives go through copy engines (the DMA engines behind
// cudaMemcpyAsync) and leave the multiprocessors to the kernels beside them. peer_group.h says how.
#ifndef MUSTER_PARALLEL_COMM_PEER_MEMORY_H_
#define MUSTER_PARALLEL_COMM_PEER_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace muster::parallel {

// Below this, the barriers of a collective by copy engines take longer than NCCL's whole call.
inline constexpr int64_t kCopyEnginesLeastBytes = int64_t{4} << 20;

struct ShareOptions {
  // One number per tensor of memory, a hash of what lies where in it; missing ones are 0. Calls on
  // memory whose number differs between ranks of the group go through NCCL.
  std::vector<uint64_t> layouts = {};
  // Calls on fewer bytes go through NCCL. Below the default nothing is measured: copy engines carry
  // everything that they can.
  int64_t least_bytes = kCopyEnginesLeastBytes;
};

// Memory that PeerMemory::Share has shared. Destroyed before the communicator and before the memory
// is freed, after all streams that use it have finished. The end is a collective of the world.
class SharedMemory {
 public:
  virtual ~SharedMemory() = default;
  // Makes the end no collective: this rank has failed, and the others may never come.
  virtual void Abandon() = 0;
};

// Called by the thread that enqueues.
class PeerMemory {
 public:
  virtual ~PeerMemory() = default;

  // Lets the other ranks of this host read `memory` of this rank until the result is destroyed.
  // From then on calls on data in it, of this communicator and of all split from the same world,
  // may go through copy engines. They do where all ranks of the group are on one host and share
  // memory of the same bytes and layout; data must then lie at the same place of it on all of them.
  // All other calls go through NCCL as before.
  //
  // Which transport carries a call is the same on all ranks, and for sums on all runs: sums of
  // shared fp32, bf16 and fp16 data of least_bytes or more always go through copy engines and have
  // the bits of Communicator's promise, once there is memory for them (UseForSums). All-gathers
  // give the same bits either way and take the transport that this call has measured to be better
  // (transport_choice.h). All-to-alls and rotations stay with copy engines: NCCL would keep 12 MiB
  // per peer and channel for them.
  //
  // A collective of the world, with as many tensors on every rank. Blocks, and takes up to some
  // hundred milliseconds per group. kUnavailable, on every rank, says why memory cannot be shared.
  virtual absl::StatusOr<std::unique_ptr<SharedMemory>> Share(
      const std::vector<kernels::Tensor>& memory, const ShareOptions& options) = 0;
  // Device memory that this group's sums of shared data pull other ranks' parts into; empty: sums
  // go through NCCL. With less than the data's bytes a sum takes several rounds. Groups may use the
  // same memory if they sum on the same stream. It outlives the calls. The same size on all ranks.
  virtual void UseForSums(const kernels::Tensor& memory) = 0;
  // How calls of this group by copy engines wait for the other ranks on a stream of high priority:
  // in a warp of one multiprocessor, which notices within microseconds, or (the default) in the
  // front end of the GPU, which takes no multiprocessor from the kernels beside but notices late.
  // Calls on other streams always wait in a warp. Ranks may differ.
  virtual void WaitInWarp(bool in_warp) = 0;
  // The part of Communicator::bytes_sent that went through copy engines.
  virtual int64_t bytes_by_copy_engines() const = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_PEER_MEMORY_H_
