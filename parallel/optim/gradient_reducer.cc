#include "parallel/optim/gradient_reducer.h"

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/ops.h"

namespace muster::parallel {

int GradientReducer::Levels(int64_t micro_batches) {
  CHECK_GT(micro_batches, 0);
  int levels = 0;
  for (; micro_batches > 0; micro_batches /= 2) ++levels;
  return levels;
}

GradientReducer::GradientReducer(FlatBuffers& flat, Communicator& communicator,
                                 kernels::Stream& compute, kernels::Stream& communication,
                                 bool overlap)
    : flat_(flat),
      communicator_(communicator),
      compute_(compute),
      communication_(communication),
      overlap_(overlap),
      pending_(flat.layout().buckets().size()) {}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Make(
    FlatBuffers& flat, Communicator& communicator, kernels::Stream& compute,
    kernels::Stream& communication, bool overlap) {
  std::unique_ptr<GradientReducer> reducer(
      new GradientReducer(flat, communicator, compute, communication, overlap));
  for (size_t i = 0; i < flat.layout().buckets().size(); ++i) {
    ASSIGN_OR_RETURN(auto event, compute.device().MakeEvent());
    reducer->merged_.push_back(std::move(event));
  }
  ASSIGN_OR_RETURN(reducer->reduced_, compute.device().MakeEvent());
  return reducer;
}

void GradientReducer::BeginStep(int64_t micro_batches) {
  CHECK_LE(Levels(micro_batches), flat_.gradient_levels());
  micro_batches_ = micro_batches;
  micro_batch_ = -1;
  level_ = -1;
  next_bucket_ = 0;
}

const ParameterViews& GradientReducer::BeginMicroBatch() {
  ++micro_batch_;
  ++level_;
  CHECK_LT(micro_batch_, micro_batches_);
  kernels::Zero(compute_, flat_.gradient(level_, {0, flat_.layout().elements()}));
  const auto& buckets = flat_.layout().buckets();
  for (size_t i = 0; i < buckets.size(); ++i) {
    pending_[i] = static_cast<int>(buckets[i].parameters.size());
  }
  return flat_.gradient_views(level_);
}

void GradientReducer::GradientReady(ParameterId parameter) {
  int& pending = pending_[flat_.layout().bucket_of(parameter)];
  --pending;
  CHECK_GE(pending, 0) << flat_.registry().at(parameter).name << " became ready twice";
  if (pending == 0 && LastMicroBatch() && overlap_) ReduceReadyBuckets();
}

void GradientReducer::Merge(int target, const FlatRange& range) {
  for (int level = level_; level > target; --level) {
    kernels::Axpy(compute_, 1.0f, flat_.gradient(level, range), flat_.gradient(level - 1, range));
  }
}

void GradientReducer::ReduceReadyBuckets() {
  const auto& buckets = flat_.layout().buckets();
  for (; next_bucket_ < buckets.size() && pending_[next_bucket_] == 0; ++next_bucket_) {
    const FlatRange& range = buckets[next_bucket_].range;
    Merge(0, range);
    if (communicator_.size() == 1) continue;
    kernels::Stream& stream = overlap_ ? communication_ : compute_;
    if (overlap_) {
      compute_.Record(*merged_[next_bucket_]);
      communication_.Wait(*merged_[next_bucket_]);
    }
    communicator_.AllReduce(stream, flat_.gradient(0, range), ReduceOp::kSum);
  }
}

void GradientReducer::EndMicroBatch() {
  for (const int pending : pending_) CHECK_EQ(pending, 0) << "parameters without a gradient";
  if (LastMicroBatch()) {
    ReduceReadyBuckets();
    CHECK_EQ(next_bucket_, flat_.layout().buckets().size());
    return;
  }
  // Subtrees of equal size merge: as many as the index of the micro-batch ends in one bits.
  int merges = 0;
  for (int64_t bits = micro_batch_; (bits & 1) != 0; bits >>= 1) ++merges;
  Merge(level_ - merges, {0, flat_.layout().elements()});
  level_ -= merges;
}

void GradientReducer::Finish() {
  if (communicator_.size() == 1 || !overlap_) return;
  communication_.Record(*reduced_);
  compute_.Wait(*reduced_);
}

}  // namespace muster::parallel
