// Gradients of the global batch: accumulation over micro-batches and reduction over data-parallel
// ranks, overlapped with the backward pass.
#ifndef MUSTER_PARALLEL_OPTIM_GRADIENT_REDUCER_H_
#define MUSTER_PARALLEL_OPTIM_GRADIENT_REDUCER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/comm/exposure.h"
#include "parallel/comm/mesh_groups.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"
#include "parallel/optim/gradient_compressor.h"

namespace muster::parallel {

struct GradientReducerOptions {
  bool overlap = true;  // off: everything on the compute stream, with the same bits
  // The dtype on the wire. bf16: contributions are rounded once, exchanged all-to-all and summed in
  // fp32 in a fixed order.
  kernels::DType wire = kernels::DType::kF32;
  // The model overwrites gradients (Pass::overwrite_gradients), so BeginMicroBatch and AcquireBlock
  // do not zero them. For ZeRO 0, and for the other stages where padding may hold old values.
  bool overwritten = false;
  // Adds the micro-batches of a rank one after the other, so that one level holds their sum.
  // Excludes `overwritten` in steps of several micro-batches with ZeRO 0 or 1.
  bool chained = false;
  // This reducer handles buckets [first, last): those of one gradient group (GradientGroups) of a
  // stage, whose micro-batches complete at the same time. last < 0: all buckets.
  int first_bucket = 0;
  int last_bucket = -1;
  // The ranks that hold the same kShared parameters, or null.
  Communicator* sharers = nullptr;
  // Handles compressed buckets, or null. Shared by the reducers of a rank.
  GradientCompressor* compressor = nullptr;
  // Counts waits for a rotating buffer that is still being reduced; may be null.
  ExposureMeter* meter = nullptr;
};

// Order of summation. Floating point sums depend on their order, and a training run amplifies the
// last bit within some hundred steps. So the contributions of a step's micro-batches are summed as
// one fixed binary tree over their global index, whatever the layout: with power-of-two degrees the
// result has the same bits for every number of ranks and every ZeRO stage; otherwise the difference
// is fp32 rounding. For that, the stages number micro-batches differently (MicroBatchOf).
// `chained` gives that up for memory: the micro-batches of a rank are added one after the other.
//
// ZeRO 0 and 1. Wgrad kernels add straight into flat gradient storage. Inside a rank, micro-batches
// merge like a binary counter (Levels() whole buffers). During the last micro-batch's backward,
// each bucket that becomes ready is merged over the levels on the compute stream, then reduced on
// the communication stream: reduce-scattered over the shard group (ZeRO-1), all-reduced over the
// replicate group.
//
// Compressed buckets (GradientCompressor) are handled apart once their levels are merged; dense
// buckets are not affected.
//
// ZeRO 2 and 3. Whole gradients of a block exist only while its backward runs (the head's: from its
// forward, which its backward follows). Every micro-batch's buckets are reduce-scattered as they
// become ready, and the own part is added to Levels() persistent partial sums; the replicate group
// follows at the end of the step.
//
// Buckets start in the order of the layout on every rank, whatever order their parameters become
// ready in. Single-threaded; everything passed in must outlive it.
class GradientReducer : public GradientListener {
 public:
  // Gradient levels that `micro_batches` per rank and step need.
  static int Levels(int64_t micro_batches, int zero = 0, bool chained = false);
  // The global index of micro-batch `j` of `per_rank` on data-parallel rank `rank`. `summed_ranks`:
  // the number of neighbouring ranks whose j-th micro-batches are summed first, 1 except for ZeRO 2
  // and 3, where it is the data-parallel ranks of a shard group.
  static int64_t MicroBatchOf(int64_t j, int64_t per_rank, int rank, int summed_ranks) {
    return rank / summed_ranks * per_rank * summed_ranks + j * summed_ranks + rank % summed_ranks;
  }

  // Device memory that a reducer takes, for the 16-bit wire.
  static int64_t Bytes(const FlatLayout& layout, const GradientReducerOptions& options) {
    return 2 * WireBytes(layout, options);
  }

  // `communication` is a threaded stream (host) or a high-priority one (CUDA).
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Make(
      FlatBuffers& flat, MeshGroups& groups, kernels::Stream& compute,
      kernels::Stream& communication, const GradientReducerOptions& options);

  // Requires: the buffers have Levels(micro_batches) gradient levels.
  void BeginStep(int64_t micro_batches);
  // Views for the backward of the next micro-batch: zeroed, or with `overwritten` of old values.
  const ParameterViews& BeginMicroBatch();
  // To be called before a block adds to its gradients, in backward or (the head) in forward: gives
  // them their rotating buffer, zeroed.
  void AcquireBlock(int block);
  void GradientReady(ParameterId parameter) override;
  // To be called after the backward of each micro-batch. Requires: every parameter was reported
  // once.
  void EndMicroBatch();
  // The event after which the own part of a bucket holds the sum of the step. Valid from the end of
  // the last micro-batch's backward to the next step; null: only Finish() completes it.
  kernels::Event* reduced(int bucket) const;
  // The collective that reduces gradients; the first, where there are several.
  Collective collective() const;
  // To be called after the last micro-batch: later work on the compute stream sees the sum over all
  // ranks in the own parts (FlatBuffers::own_gradient level 0).
  void Finish();

 private:
  GradientReducer(FlatBuffers& flat, MeshGroups& groups, kernels::Stream& compute,
                  kernels::Stream& communication, const GradientReducerOptions& options);
  absl::Status Allocate();
  // The size of one of its two buffers; 0: there are none.
  static int64_t WireBytes(const FlatLayout& layout, const GradientReducerOptions& options);
  bool LastMicroBatch() const { return micro_batch_ + 1 == micro_batches_; }
  bool sharded() const { return flat_.options().zero >= 2; }
  int first_bucket() const { return options_.first_bucket; }
  int last_bucket() const { return last_bucket_; }
  bool all_buckets() const {
    return last_bucket_ - first_bucket() == static_cast<int>(pending_.size());
  }
  kernels::Stream& reduction() { return options_.overlap ? communication_ : compute_; }
  // Subtrees that the current micro-batch completes.
  int Merges() const;
  // Merges the levels above `target` into it, over one bucket or everything.
  void Merge(int target, int bucket);
  void MergeAll(int target);
  void ReduceReadyBuckets();
  void ReduceBucket(int bucket);
  // Sum over the group: afterwards the rank's range of `data` (or all of it) holds the sum.
  void ReduceScatter(kernels::Stream& stream, Communicator& group, kernels::Tensor data);
  void AllReduce(kernels::Stream& stream, Communicator& group, kernels::Tensor data);
  // If this is the first contribution to the partial sum, reduces straight into it and returns
  // true.
  bool ReduceToOwn(kernels::Stream& stream, int bucket);
  // Adds the part just reduced to the partial sums.
  void Accumulate(kernels::Stream& stream, int bucket);

  FlatBuffers& flat_;
  MeshGroups& groups_;
  kernels::Stream& compute_;
  kernels::Stream& communication_;
  const GradientReducerOptions options_;
  const int last_bucket_;
  std::unique_ptr<kernels::Buffer> sent_, received_;      // of the 16-bit wire, one bucket each
  std::vector<std::unique_ptr<kernels::Event>> ready_;    // per bucket
  std::vector<std::unique_ptr<kernels::Event>> reduced_;  // per bucket
  std::unique_ptr<kernels::Event> finished_;
  std::vector<int> bucket_of_block_;  // its rotating bucket, or -1
  std::vector<int> pending_;          // per bucket: parameters not ready yet
  int next_bucket_ = 0;               // first one not started
  int64_t micro_batches_ = 0;
  int64_t micro_batch_ = 0;
  // ZeRO 0, 1: the level that the current micro-batch writes to. ZeRO 2, 3: the number of partial
  // sums.
  int level_ = -1;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_GRADIENT_REDUCER_H_
