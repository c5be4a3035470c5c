// Activations of a micro-batch in the host's memory between the forward and the backward of their
// blocks.
//
// The blocks of a workspace use two slots of device memory in turn, each as large as the largest of
// its blocks needs. When a block's forward has been enqueued, its activations are copied to the
// host while the next block computes in the other slot; the block after that waits for the copy.
// Where the last GEMM of a block writes into the slot of the next one, it waits as well
// (ForwardState::await_next_sum). The last two blocks stay on the device. When a block's backward
// is done with its slot, the activations of the block two before it are fetched there while the one
// between computes. Backward reads the bits that forward wrote.
#ifndef MUSTER_PARALLEL_MODEL_ACTIVATION_OFFLOAD_H_
#define MUSTER_PARALLEL_MODEL_ACTIVATION_OFFLOAD_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::parallel {

// The blocks of a workspace that share slots, and the slots' memory.
struct ActivationSlots {
  static constexpr int kSlots = 2;

  int first = 0;               // first block, as the model counts them
  std::vector<int64_t> bytes;  // of the activations of each block, from `first` on
  kernels::Tensor slots;       // u8, the slots one behind the other

  int count() const { return static_cast<int>(bytes.size()); }
  bool Covers(int block) const { return block >= first && block < first + count(); }
  // The number of blocks, from the first, that are copied; the others stay on the device.
  int copied() const { return std::max(0, count() - kSlots); }
  int64_t slot_bytes(int slot) const {
    int64_t most = 0;
    for (int i = slot; i < count(); i += kSlots) most = std::max(most, bytes[i]);
    return most;
  }
  // Offset of a slot, or of the end of the last.
  int64_t slot_offset(int slot) const {
    return slot == 0 ? 0 : slot_offset(slot - 1) + slot_bytes(slot - 1);
  }
  // Offset, in the host's memory, of the activations of the block at `index` of `bytes`.
  int64_t host_offset(int index) const {
    return std::accumulate(bytes.begin(), bytes.begin() + index, int64_t{0});
  }
  int64_t host_bytes() const { return host_offset(copied()); }
};

// The streams of the copies, for all workspaces of a model.
struct ActivationStreams {
  std::unique_ptr<kernels::Stream> out, in;

  static absl::StatusOr<std::unique_ptr<ActivationStreams>> Make(kernels::Device& device);
};

// Owns the host memory of one workspace. Called by the thread that enqueues on the compute stream,
// before and after it enqueues each block.
class ActivationOffload {
 public:
  // `streams` must outlive the result. kResourceExhausted: there is not enough host memory.
  static absl::StatusOr<std::unique_ptr<ActivationOffload>> Make(kernels::Device& device,
                                                                 ActivationStreams& streams,
                                                                 const ActivationSlots& slots);

  void BeforeForward(kernels::Stream& compute, int block);
  // Only where a backward will follow.
  void AfterForward(kernels::Stream& compute, int block);
  void BeforeBackward(kernels::Stream& compute, int block);
  void AfterBackward(kernels::Stream& compute, int block);

 private:
  ActivationOffload(ActivationStreams& streams, const ActivationSlots& slots)
      : streams_(streams), slots_(slots) {}
  // The activations of the block at `index`, on the device and on the host.
  kernels::Tensor Slot(int index) const;
  kernels::Tensor Home(int index) const;

  ActivationStreams& streams_;
  const ActivationSlots slots_;
  std::unique_ptr<kernels::Buffer> memory_;
  std::unique_ptr<kernels::Event> computed_;
  std::unique_ptr<kernels::Event> stored_[ActivationSlots::kSlots];   // by slot
  std::unique_ptr<kernels::Event> fetched_[ActivationSlots::kSlots];  // by slot
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_ACTIVATION_OFFLOAD_H_
