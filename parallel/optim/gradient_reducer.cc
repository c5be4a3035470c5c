#include "parallel/optim/gradient_reducer.h"

#include <algorithm>

#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

int GradientReducer::Levels(int64_t micro_batches, int zero, bool chained) {
  CHECK_GT(micro_batches, 0);
  if (chained) return 1;
  int levels = 0;
  if (zero < 2) {
    for (; micro_batches > 0; micro_batches /= 2) ++levels;
    return levels;
  }
  // Only sums that wait for a partner occupy a level; the current micro-batch does not.
  levels = 1;
  for (int64_t j = 0; j + 1 < micro_batches; j += 2) {
    int waiting = 1;
    for (int64_t bits = j; bits > 0; bits /= 2) waiting += static_cast<int>(bits & 1);
    levels = std::max(levels, waiting);
  }
  return levels;
}

GradientReducer::GradientReducer(FlatBuffers& flat, MeshGroups& groups, kernels::Stream& compute,
                                 kernels::Stream& communication,
                                 const GradientReducerOptions& options)
    : flat_(flat),
      groups_(groups),
      compute_(compute),
      communication_(communication),
      options_(options),
      last_bucket_(options.last_bucket < 0 ? static_cast<int>(flat.layout().buckets().size())
                                           : options.last_bucket),
      pending_(flat.layout().buckets().size()) {}

absl::StatusOr<std::unique_ptr<GradientReducer>> GradientReducer::Make(
    FlatBuffers& flat, MeshGroups& groups, kernels::Stream& compute, kernels::Stream& communication,
    const GradientReducerOptions& options) {
  std::unique_ptr<GradientReducer> reducer(
      new GradientReducer(flat, groups, compute, communication, options));
  RETURN_IF_ERROR(reducer->Allocate());
  return reducer;
}

int64_t GradientReducer::WireBytes(const FlatLayout& layout,
                                   const GradientReducerOptions& options) {
  if (options.wire == DType::kF32) return 0;
  int64_t largest = 0;
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    largest = std::max(largest, bucket.range.size());
  }
  return largest * SizeOf(options.wire);
}

absl::Status GradientReducer::Allocate() {
  kernels::Device& device = compute_.device();
  for (int i = 0; i < static_cast<int>(pending_.size()); ++i) {
    const FlatLayout::Bucket& bucket = flat_.layout().buckets()[i];
    CHECK(!bucket.compressed || options_.compressor != nullptr);
    CHECK(!bucket.shared || options_.sharers != nullptr);
    if (bucket.block >= 0) {
      bucket_of_block_.resize(std::max<size_t>(bucket_of_block_.size(), bucket.block + 1), -1);
      bucket_of_block_[bucket.block] = i;
    }
    ASSIGN_OR_RETURN(auto ready, device.MakeEvent());
    ready_.push_back(std::move(ready));
    ASSIGN_OR_RETURN(auto reduced, device.MakeEvent());
    reduced_.push_back(std::move(reduced));
  }
  ASSIGN_OR_RETURN(finished_, device.MakeEvent());
  if (const int64_t bytes = WireBytes(flat_.layout(), options_); bytes > 0) {
    ASSIGN_OR_RETURN(sent_, device.Allocate(bytes));
    ASSIGN_OR_RETURN(received_, device.Allocate(bytes));
  }
  return absl::OkStatus();
}

void GradientReducer::BeginStep(int64_t micro_batches) {
  CHECK_LE(Levels(micro_batches, flat_.options().zero, options_.chained), flat_.gradient_levels());
  CHECK(!options_.chained || !options_.overwritten || sharded() || micro_batches == 1);
  micro_batches_ = micro_batches;
  micro_batch_ = -1;
  level_ = sharded() ? 0 : -1;
}

const ParameterViews& GradientReducer::BeginMicroBatch() {
  ++micro_batch_;
  CHECK_LT(micro_batch_, micro_batches_);
  next_bucket_ = first_bucket();
  for (int i = first_bucket(); i < last_bucket(); ++i) {
    pending_[i] = static_cast<int>(flat_.layout().buckets()[i].parameters.size());
  }
  if (!sharded()) {
    if (!options_.chained || micro_batch_ == 0) ++level_;
    const bool adds = options_.chained && micro_batch_ > 0;
    if (adds || options_.overwritten) return flat_.gradient_views(level_);
    if (all_buckets()) {
      kernels::Zero(compute_, flat_.all_gradients(level_));
    } else {
      for (int i = first_bucket(); i < last_bucket(); ++i) {
        kernels::Zero(compute_, flat_.whole_gradients(i, level_));
      }
    }
    return flat_.gradient_views(level_);
  }
  for (int i = first_bucket(); i < last_bucket(); ++i) {
    if (flat_.gradients_rotate(i)) continue;
    // Waits until the previous contents have been reduced.
    if (options_.overlap) compute_.Wait(*reduced_[i]);
    kernels::Zero(compute_, flat_.whole_gradients(i));
  }
  return flat_.gradient_views(0);
}

void GradientReducer::AcquireBlock(int block) {
  if (block >= static_cast<int>(bucket_of_block_.size()) || bucket_of_block_[block] < 0) return;
  const int bucket = bucket_of_block_[block];
  if (options_.overlap) {
    if (options_.meter != nullptr) {
      options_.meter->Begin(Exposure::kGradients, collective(), compute_);
    }
    compute_.Wait(flat_.gradient_slot_empty(flat_.gradient_slot(bucket)));
    if (options_.meter != nullptr) options_.meter->End(compute_);
  }
  if (!options_.overwritten) kernels::Zero(compute_, flat_.whole_gradients(bucket));
}

void GradientReducer::GradientReady(ParameterId parameter) {
  int& pending = pending_[flat_.layout().bucket_of(parameter)];
  --pending;
  CHECK_GE(pending, 0) << flat_.registry().at(parameter).name << " became ready twice";
  if (pending > 0) return;
  // A rotating buffer is reused soon, so its contents are reduced before EndMicroBatch.
  if (sharded() || (LastMicroBatch() && options_.overlap)) ReduceReadyBuckets();
}

int GradientReducer::Merges() const {
  // The number of trailing one bits of the micro-batch's index; after the last one, all remaining
  // sums.
  if (LastMicroBatch() || options_.chained) return level_;
  int merges = 0;
  for (int64_t bits = micro_batch_; (bits & 1) != 0; bits >>= 1) ++merges;
  return merges;
}

void GradientReducer::Merge(int target, int bucket) {
  for (int level = level_; level > target; --level) {
    kernels::Axpy(compute_, 1.0f, flat_.whole_gradients(bucket, level),
                  flat_.whole_gradients(bucket, level - 1));
  }
}

void GradientReducer::MergeAll(int target) {
  if (!all_buckets()) {
    for (int i = first_bucket(); i < last_bucket(); ++i) Merge(target, i);
    return;
  }
  for (int level = level_; level > target; --level) {
    kernels::Axpy(compute_, 1.0f, flat_.all_gradients(level), flat_.all_gradients(level - 1));
  }
}

void GradientReducer::ReduceReadyBuckets() {
  for (; next_bucket_ < last_bucket() && pending_[next_bucket_] == 0; ++next_bucket_) {
    ReduceBucket(next_bucket_);
  }
}

void GradientReducer::ReduceBucket(int bucket) {
  if (!sharded()) Merge(0, bucket);
  kernels::Stream& stream = reduction();
  if (options_.overlap) {
    compute_.Record(*ready_[bucket]);
    communication_.Wait(*ready_[bucket]);
  }
  const bool compressed = flat_.layout().buckets()[bucket].compressed;
  if (!compressed || !options_.compressor->Exchange(stream, bucket)) {
    if (!ReduceToOwn(stream, bucket)) {
      ReduceScatter(stream, groups_.shard(), flat_.whole_gradients(bucket));
      if (sharded()) Accumulate(stream, bucket);
    }
    if (LastMicroBatch()) AllReduce(stream, groups_.replicate(), flat_.own_gradient(bucket));
  }
  if (!options_.overlap) return;
  communication_.Record(*reduced_[bucket]);
  if (flat_.gradients_rotate(bucket)) {
    communication_.Record(flat_.gradient_slot_empty(flat_.gradient_slot(bucket)));
  }
}

bool GradientReducer::ReduceToOwn(kernels::Stream& stream, int bucket) {
  if (!sharded() || groups_.shard().size() == 1 || options_.wire != DType::kF32 || Merges() > 0) {
    return false;
  }
  groups_.shard().ReduceScatterTo(stream, flat_.whole_gradients(bucket),
                                  flat_.own_gradient(bucket, level_), ReduceOp::kSum);
  return true;
}

void GradientReducer::ReduceScatter(kernels::Stream& stream, Communicator& group, Tensor data) {
  if (group.size() == 1) return;
  if (options_.wire == DType::kF32) {
    group.ReduceScatter(stream, data, ReduceOp::kSum);
    return;
  }
  const int64_t part = data.elements() / group.size();
  const Tensor sent(sent_->data(), options_.wire, {data.elements()});
  const Tensor received(received_->data(), options_.wire, {data.elements()});
  kernels::Cast(stream, data, sent);
  group.AllToAll(stream, sent, received);
  kernels::SumParts(stream, received, data.Rows(group.rank() * part, part));
}

void GradientReducer::AllReduce(kernels::Stream& stream, Communicator& group, Tensor data) {
  if (group.size() == 1) return;
  if (options_.wire == DType::kF32) {
    group.AllReduce(stream, data, ReduceOp::kSum);
    return;
  }
  ReduceScatter(stream, group, data);
  const int64_t part = data.elements() / group.size();
  const Tensor all(sent_->data(), options_.wire, {data.elements()});
  kernels::Cast(stream, data.Rows(group.rank() * part, part), all.Rows(group.rank() * part, part));
  group.AllGather(stream, all);
  // The own part is rounded as well, so that all ranks hold the same values.
  kernels::Cast(stream, all, data);
}

void GradientReducer::Accumulate(kernels::Stream& stream, int bucket) {
  const int64_t size = flat_.layout().buckets()[bucket].range.size() / flat_.layout().shards();
  const Tensor part = flat_.whole_gradients(bucket).Rows(flat_.options().shard * size, size);
  const int merges = Merges();
  if (merges == 0) {
    kernels::Copy(stream, part, flat_.own_gradient(bucket, level_));
    return;
  }
  kernels::Axpy(stream, 1.0f, part, flat_.own_gradient(bucket, level_ - 1));
  for (int level = level_ - 1; level > level_ - merges; --level) {
    kernels::Axpy(stream, 1.0f, flat_.own_gradient(bucket, level),
                  flat_.own_gradient(bucket, level - 1));
  }
}

void GradientReducer::EndMicroBatch() {
  for (const int pending : pending_) CHECK_EQ(pending, 0) << "parameters without a gradient";
  if (sharded() || LastMicroBatch()) {
    ReduceReadyBuckets();
    CHECK_EQ(next_bucket_, last_bucket());
  }
  const int merges = Merges();
  if (sharded()) {
    level_ += 1 - merges;
  } else if (!LastMicroBatch()) {
    MergeAll(level_ - merges);
    level_ -= merges;
  }
}

kernels::Event* GradientReducer::reduced(int bucket) const {
  const FlatLayout::Bucket& of = flat_.layout().buckets()[bucket];
  const bool mine = bucket >= first_bucket() && bucket < last_bucket();
  return mine && options_.overlap && !of.partial && !of.shared ? reduced_[bucket].get() : nullptr;
}

Collective GradientReducer::collective() const {
  if (options_.compressor != nullptr) return Collective::kAllGather;
  if (options_.wire != DType::kF32) return Collective::kAllToAll;
  return groups_.shard().size() > 1 ? Collective::kReduceScatter : Collective::kAllReduce;
}

void GradientReducer::Finish() {
  if (options_.overlap) {
    communication_.Record(*finished_);
    compute_.Wait(*finished_);
  }
  Communicator& tensor = groups_.Along({Axis::kTensor});
  if (tensor.size() == 1) return;
  // The sum over tensor ranks comes last, when only the own part has to be sent.
  for (int i = first_bucket(); i < last_bucket(); ++i) {
    const FlatLayout::Bucket& bucket = flat_.layout().buckets()[i];
    if (bucket.partial) tensor.AllReduce(compute_, flat_.own_gradient(i), ReduceOp::kSum);
    if (bucket.shared) options_.sharers->AllReduce(compute_, flat_.own_gradient(i), ReduceOp::kSum);
  }
}

}  // namespace muster::parallel
