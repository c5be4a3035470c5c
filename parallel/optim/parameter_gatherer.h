// Gathers the parameters that a rank does not own before the model reads them.
#ifndef MUSTER_PARALLEL_OPTIM_PARAMETER_GATHERER_H_
#define MUSTER_PARALLEL_OPTIM_PARAMETER_GATHERER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/exposure.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/gradient_reducer.h"

namespace muster::parallel {

// The gate of a model whose parameters are sharded (BlockGate); every rank of the gather group must
// run the same passes.
//
// Buckets that stay whole (ZeRO 1 and 2; the resident ones of ZeRO-3) are gathered once after every
// update, each as soon as its own part is written, on a stream of their own that overlaps with the
// next forward pass. A block waits only for the buckets that hold its parameters.
//
// ZeRO-3: a block's bucket, the embedding's and the head's included, is gathered into its rotating
// buffer while the block in front of it runs; the first ones of forward while the others are
// updated. A bucket that is still in its buffer is not gathered again. A step of n micro-batches
// and B blocks makes B + (2 n - 1) (B - k) gathers with k rotating buffers (AssignSlots); without
// reshard_after_forward k is B.
//
// Single-threaded; everything passed in must outlive it.
class ParameterGatherer : public BlockGate {
 public:
  // `stream` is like the communication stream of GradientReducer but another one, because gathers
  // must not queue behind reductions. `reducer`: any one of the buffers' reducers. `parts`:
  // Model::parts(); the next block is gathered ahead only within one of them.
  static absl::StatusOr<std::unique_ptr<ParameterGatherer>> Make(
      FlatBuffers& flat, Communicator& group, GradientReducer& reducer,
      const std::vector<BlockRange>& parts, kernels::Stream& compute, kernels::Stream& stream,
      bool overlap);

  // Sets the meter that counts waits of the compute stream.
  void Measure(ExposureMeter& meter) { meter_ = &meter; }

  // Reports that the own part of the bucket has been written on the compute stream. To be called
  // for every bucket, in the same order on all ranks; later buckets first is the order of forward.
  void Updated(int bucket);
  // The same for a bucket that another stream writes, until `written`.
  void UpdatedBy(kernels::Event& written, int bucket);
  // The same for all buckets.
  void AllUpdated();
  // Makes later work on the compute stream see the whole bucket. Requires: it does not rotate.
  void Await(int bucket);

  void Acquire(int block, BlockWork work) override;
  bool AcquireEarly(absl::Span<const ParameterId> parameters) override;
  void Release(int block, BlockWork work) override;

 private:
  ParameterGatherer(FlatBuffers& flat, Communicator& group, GradientReducer& reducer,
                    const std::vector<BlockRange>& parts, kernels::Stream& compute,
                    kernels::Stream& stream, bool overlap);
  absl::Status Allocate();
  kernels::Stream& gathering() { return overlap_ ? stream_ : compute_; }
  int BucketOf(int block) const;
  // The bucket of the block that comes after `block`, -1 if none.
  int NextBucket(int block, bool backward) const;
  void Gather(int bucket);
  void Invalidate(int bucket);
  void EnsureGathered(int bucket);

  FlatBuffers& flat_;
  Communicator& group_;
  GradientReducer& reducer_;
  const std::vector<BlockRange> parts_;
  kernels::Stream& compute_;
  kernels::Stream& stream_;
  const bool overlap_;
  ExposureMeter* meter_ = nullptr;
  std::vector<std::unique_ptr<kernels::Event>> updated_, gathered_;  // per bucket
  std::vector<std::unique_ptr<kernels::Event>> used_;                // per slot: after the last use
  std::vector<int> first_block_;      // per bucket: first block that uses it
  std::vector<bool> awaited_;         // per bucket: compute has not yet waited for the gather
  std::vector<int> held_;             // per slot: bucket, -1 none
  std::vector<bool> first_of_slot_;   // per bucket: whether forward begins with it
  std::vector<int> bucket_of_block_;  // its rotating bucket, or -1
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_PARAMETER_GATHERER_H_
