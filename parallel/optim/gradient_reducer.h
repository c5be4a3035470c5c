// Gradients of the global batch: accumulation over micro-batches and reduction over data-parallel
// ranks, overlapped with the backward pass of the last micro-batch.
#ifndef MUSTER_PARALLEL_OPTIM_GRADIENT_REDUCER_H_
#define MUSTER_PARALLEL_OPTIM_GRADIENT_REDUCER_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device.h"
#include "parallel/comm/communicator.h"
#include "parallel/model/model.h"
#include "parallel/optim/flat_buffers.h"

namespace muster::parallel {

// Order of summation. Floating point sums depend on their order, and a training run amplifies the
// last bit within some hundred steps. So the contributions of a step's micro-batches are summed as
// one fixed binary tree over their global index: inside a rank like a binary counter (equal sized
// subtrees merge at once, which takes Levels(n) gradient buffers), and between ranks by the
// communicator. With power-of-two micro-batches per rank the result has the same bits for every
// number of ranks that divides them, and with any other number the difference is fp32 rounding.
//
// Wgrad kernels add straight into flat gradient storage; nothing is copied into buckets. During the
// last micro-batch's backward, each parameter that becomes ready counts down its bucket; a complete
// bucket is merged over the levels on the compute stream and all-reduced on the communication
// stream while backward goes on. Buckets start in the order of flat storage on every rank, whatever
// order their parameters become ready in. With `overlap` off the same calls run on the compute
// stream: the same bits.
//
// Single-threaded; everything passed in must outlive it.
class GradientReducer : public GradientListener {
 public:
  // Gradient buffers that `micro_batches` per rank and step need: floor(log2 n) + 1.
  static int Levels(int64_t micro_batches);

  // `communication` is a threaded stream (host) or a high-priority one (CUDA).
  static absl::StatusOr<std::unique_ptr<GradientReducer>> Make(FlatBuffers& flat,
                                                               Communicator& communicator,
                                                               kernels::Stream& compute,
                                                               kernels::Stream& communication,
                                                               bool overlap);

  // Requires: the layout has Levels(micro_batches) gradient levels.
  void BeginStep(int64_t micro_batches);
  // Zeroed views for the backward of the next micro-batch.
  const ParameterViews& BeginMicroBatch();
  void GradientReady(ParameterId parameter) override;
  // After the backward of each micro-batch. Requires: every parameter has become ready once.
  void EndMicroBatch();
  // After the last one: later work on the compute stream sees the sum over all ranks in level 0.
  void Finish();

 private:
  GradientReducer(FlatBuffers& flat, Communicator& communicator, kernels::Stream& compute,
                  kernels::Stream& communication, bool overlap);
  bool LastMicroBatch() const { return micro_batch_ + 1 == micro_batches_; }
  // Merges the levels above `target` into it, over `range`.
  void Merge(int target, const FlatRange& range);
  void ReduceReadyBuckets();

  FlatBuffers& flat_;
  Communicator& communicator_;
  kernels::Stream& compute_;
  kernels::Stream& communication_;
  const bool overlap_;
  std::vector<std::unique_ptr<kernels::Event>> merged_;  // per bucket
  std::unique_ptr<kernels::Event> reduced_;
  std::vector<int> pending_;  // per bucket: parameters not ready yet
  size_t next_bucket_ = 0;    // first one not started
  int64_t micro_batches_ = 0;
  int64_t micro_batch_ = 0;
  int level_ = -1;  // that the current micro-batch writes to
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_OPTIM_GRADIENT_REDUCER_H_
