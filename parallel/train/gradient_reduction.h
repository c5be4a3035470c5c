// The way of a rank's gradients, from the buffers that backward writes to the sums of the step.
#ifndef MUSTER_PARALLEL_TRAIN_GRADIENT_REDUCTION_H_
#define MUSTER_PARALLEL_TRAIN_GRADIENT_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "kernels/tensor.h"
#include "parallel/comm/communicator.h"
#include "parallel/model/model.h"
#include "parallel/optim/gradient_compressor.h"
#include "parallel/optim/gradient_reducer.h"
#include "parallel/train/inputs.h"
#include "parallel/train/metered_groups.h"
#include "parallel/train/rank_memory.h"

namespace muster::parallel {

// Owns a reducer for every gradient group (GradientGroups in executor.h), the compressor, and what
// is particular about some gradients: key/value heads that tensor ranks share, a tied table that
// two pipeline stages hold, and residuals of a checkpoint that are not compressed any more.
// Single-threaded; the arguments must outlive it.
class GradientReduction {
 public:
  // A collective. kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<GradientReduction>> Make(const TrainerInputs& inputs,
                                                                 RankMemory& memory,
                                                                 MeteredGroups& groups);
  // Measures one bucket with and without compression, and warns on rank 0 when compression takes
  // longer. A collective; does nothing without compression. Leaves the gradients zero.
  absl::Status CompareWithDense();

  // A step: BeginStep; for every micro-batch and group BeginMicroBatch, GradientReady of every
  // parameter, EndMicroBatch; then Finish, after which later work on the computing stream sees the
  // sums over all ranks. `step` counts from 1.
  void BeginStep(int64_t step);
  const ParameterViews& BeginMicroBatch(int group) { return reducers_[group]->BeginMicroBatch(); }
  void GradientReady(ParameterId parameter);
  void EndMicroBatch(int group) { reducers_[group]->EndMicroBatch(); }
  void Finish();
  // When the own gradients of a bucket are those of the step; null: not before Finish().
  kernels::Event* reduced(int bucket) const;
  // Whether backward overwrites gradients rather than adding to zeros.
  bool overwrites() const;
  // What the gather of parameters must wait for, and what gradients are reduced by.
  GradientReducer& front() { return *reducers_.front(); }

  // Null: gradients are sent whole.
  GradientCompressor* compressor() { return compressor_.get(); }
  // Of the step that was enqueued last: share of the compressed elements that was sent.
  double density() const;
  // Enqueues a copy of the sum of squares of what compression holds back to pinned host memory.
  // Requires: compressor() != nullptr.
  void CopyResidualSquare(float* host);

  // A slice of a bucket's own gradients, and values on the host that belong to it.
  struct Carried {
    int bucket = 0;
    int64_t begin = 0;  // elements, in the own part of the bucket
    kernels::Tensor elements;
  };
  // What the ranks of an earlier run had not sent, summed over all of them, of parameters that are
  // not compressed here: added to the sums of the next step. `memory` holds the elements.
  void Carry(std::vector<Carried> carried, std::unique_ptr<kernels::Buffer> memory);
  bool carries() const { return !carried_.empty(); }
  // Enqueues the additions, behind Finish().
  void AddCarried();
  // The additions have run.
  void ReleaseCarried();

  // By this rank since it began: to reduce gradients, and of these among the ranks that share its
  // key/value heads.
  int64_t bytes_sent() const;
  int64_t key_bytes_sent() const { return sharers_ == nullptr ? 0 : sharers_->bytes_sent(); }

 private:
  GradientReduction(const TrainerInputs& inputs, RankMemory& memory);
  absl::Status MakeReducers(MeteredGroups& groups);
  absl::Status AllocateTiedTable();
  // Adds what the other stage has found for a tied table.
  void SumTiedTable();

  const TrainerInputs& inputs_;
  RankMemory& memory_;
  const std::vector<BlockRange> groups_;
  std::unique_ptr<GradientCompressor> compressor_;
  std::unique_ptr<kernels::Buffer> residual_square_;
  std::unique_ptr<Communicator> sharers_;  // of key/value heads; null: no tensor ranks share any
  std::vector<std::unique_ptr<GradientReducer>> reducers_;  // by group
  int tied_bucket_ = -1;                             // of the table that another stage holds too
  std::unique_ptr<kernels::Buffer> tied_;            // the gradients of that stage
  std::vector<Carried> carried_;                     // until they have been enqueued
  std::unique_ptr<kernels::Buffer> carried_memory_;  // until they have been added
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_TRAIN_GRADIENT_REDUCTION_H_
