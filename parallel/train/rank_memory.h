// The memory of one rank's training: streams, flat buffers, workspace, numbers of a step.
#ifndef MUSTER_PARALLEL_TRAIN_RANK_MEMORY_H_
#define MUSTER_PARALLEL_TRAIN_RANK_MEMORY_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/arena.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/peer_memory.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/flat_layout.h"
#include "parallel/pipeline/executor.h"
#include "parallel/train/inputs.h"
#include "parallel/train/memory.h"

namespace muster::parallel {

// Allocates everything that several parts of a Trainer work on, in three calls: Make, TakeWorkspace
// and ShareWithPeers. memory.h predicts the bytes. Single-threaded.
class RankMemory {
 public:
  // Makes the streams, the flat buffers (whose weights have no values yet) and the numbers of a
  // step. kResourceExhausted with the sizes.
  static absl::StatusOr<std::unique_ptr<RankMemory>> Make(const TrainerInputs& inputs);
  ~RankMemory();

  // Plans the workspace that `executor` needs, allocates it and gives it to the executor. A
  // collective where tensor-parallel ranks must have the same layout. kResourceExhausted.
  absl::Status TakeWorkspace(PipelineExecutor& executor);
  // Lets the ranks of this host read flat buffers and workspace by copy engines. A collective;
  // does nothing on the host and with one rank. Falls back to NCCL alone, with a warning.
  absl::Status ShareWithPeers();
  // Ends the sharing, once all streams have finished. `all_ranks`: every rank comes here,
  // so that they can wait for each other; false after a failure.
  void StopSharing(bool all_ranks);

  kernels::Stream& compute() { return *compute_; }
  // Reductions of gradients, and gathers of parameters, beside `compute`.
  kernels::Stream& communication() { return *communication_; }
  kernels::Stream& gathering() { return *gathering_; }

  const FlatLayout& layout() const { return layout_; }
  FlatBuffers& flat() { return *flat_; }
  const kernels::Arena& arena() const { return arena_; }

  // fp32 numbers of a step or an evaluation (losses, token counts, norms): ValueSlots() of them, on
  // the device, and as many in pinned host memory.
  kernels::Tensor values(int64_t first, int64_t count) { return Floats(*values_, first, count); }
  float* host_values() { return static_cast<float*>(host_values_->data()); }
  kernels::Tensor host_values(int64_t first, int64_t count) {
    return Floats(*host_values_, first, count);
  }

  // Bytes of parameters, optimizer state and gradients on the device (also of gradients that are
  // in the workspace), and on the host.
  int64_t state_bytes() const;
  int64_t host_state_bytes() const { return FlatBuffers::HostBytes(layout_, flat_->options()); }
  MemoryUse Predicted() const;

 private:
  explicit RankMemory(const TrainerInputs& inputs);
  absl::Status Allocate();
  // What MostOfEach gives for the ranks of this one's tensor group; empty where theirs are alike.
  absl::StatusOr<std::vector<int64_t>> AlignedWorkspace();
  absl::Status TakeMemoryForSums();

  const TrainerInputs& inputs_;
  const FlatLayout layout_;
  kernels::Arena arena_;
  std::vector<int64_t> workspace_;  // TrainerPlace::workspace; empty: null
  std::unique_ptr<FlatBuffers> flat_;
  std::unique_ptr<kernels::Buffer> values_, host_values_;
  // Behind the memory they use, so that they end before it.
  std::unique_ptr<kernels::Stream> compute_, communication_, gathering_;
  std::unique_ptr<kernels::Buffer> gradient_sums_, tensor_sums_;  // for Communicator::UseForSums
  std::unique_ptr<SharedMemory> shared_;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_RANK_MEMORY_H_
