// Activations of a micro-batch in the host's memory between the forward and the backward of their
// blocks.
//
// The transformer blocks of a workspace use two slots of device memory in turn. When a block's
// forward has been enqueued, its slot is copied to the host while the next block computes in the
// other slot; the block after that waits for the copy. The last two blocks stay on the device. When
// a block's backward is done with its slot, the activations of the block two before it are fetched
// there while the one between computes. Backward reads the bits that forward wrote.
#ifndef MUSTER_PARALLEL_MODEL_ACTIVATION_OFFLOAD_H_
#define MUSTER_PARALLEL_MODEL_ACTIVATION_OFFLOAD_H_

#include <algorithm>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::parallel {

// The blocks of a workspace that share slots, and the slots' memory.
struct ActivationSlots {
  static constexpr int kSlots = 2;

  int first = 0;          // first block, as the model counts them
  int count = 0;          // blocks; 0: none
  int64_t bytes = 0;      // of one slot
  kernels::Tensor slots;  // u8 [kSlots x bytes], or [count x bytes] where that is less

  bool Covers(int block) const { return block >= first && block < first + count; }
  // The number of blocks, from the first, that are copied; the others stay on the device.
  int copied() const { return std::max(0, count - kSlots); }
  int64_t host_bytes() const { return copied() * bytes; }
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
