#include "parallel/optim/parameter_gatherer.h"

#include <algorithm>
#include <utility>

#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::Tensor;

ParameterGatherer::ParameterGatherer(FlatBuffers& flat, Communicator& group,
                                     GradientReducer& reducer, const std::vector<BlockRange>& parts,
                                     kernels::Stream& compute, kernels::Stream& stream,
                                     bool overlap)
    : flat_(flat),
      group_(group),
      reducer_(reducer),
      parts_(parts),
      compute_(compute),
      stream_(stream),
      overlap_(overlap) {}

absl::StatusOr<std::unique_ptr<ParameterGatherer>> ParameterGatherer::Make(
    FlatBuffers& flat, Communicator& group, GradientReducer& reducer,
    const std::vector<BlockRange>& parts, kernels::Stream& compute, kernels::Stream& stream,
    bool overlap) {
  std::unique_ptr<ParameterGatherer> gatherer(
      new ParameterGatherer(flat, group, reducer, parts, compute, stream, overlap));
  RETURN_IF_ERROR(gatherer->Allocate());
  return gatherer;
}

absl::Status ParameterGatherer::Allocate() {
  kernels::Device& device = compute_.device();
  const auto& buckets = flat_.layout().buckets();
  for (int i = 0; i < static_cast<int>(buckets.size()); ++i) {
    ASSIGN_OR_RETURN(auto updated, device.MakeEvent());
    updated_.push_back(std::move(updated));
    ASSIGN_OR_RETURN(auto gathered, device.MakeEvent());
    gathered_.push_back(std::move(gathered));
    int first = flat_.registry().at(buckets[i].parameters.front()).block;
    for (const ParameterId id : buckets[i].parameters) {
      first = std::min(first, flat_.registry().at(id).block);
    }
    first_block_.push_back(first);
    if (flat_.parameters_rotate(i)) {
      const int block = buckets[i].block;
      bucket_of_block_.resize(std::max<size_t>(bucket_of_block_.size(), block + 1), -1);
      bucket_of_block_[block] = i;
    }
  }
  awaited_.assign(buckets.size(), false);
  for (int slot = 0; slot < flat_.parameter_slots(); ++slot) {
    ASSIGN_OR_RETURN(auto used, device.MakeEvent());
    used_.push_back(std::move(used));
    held_.push_back(-1);
  }
  std::vector<bool> seen(static_cast<size_t>(flat_.parameter_slots()));
  first_of_slot_.resize(buckets.size());
  for (int i = static_cast<int>(buckets.size()) - 1; i >= 0; --i) {
    if (!flat_.parameters_rotate(i)) continue;
    first_of_slot_[i] = !seen[flat_.parameter_slot(i)];
    seen[flat_.parameter_slot(i)] = true;
  }
  return absl::OkStatus();
}

int ParameterGatherer::BucketOf(int block) const {
  const bool known = block >= 0 && block < static_cast<int>(bucket_of_block_.size());
  return known ? bucket_of_block_[block] : -1;
}

void ParameterGatherer::Gather(int bucket) {
  if (const Tensor source = flat_.gather_source(bucket); !source.empty()) {
    kernels::Copy(gathering(), source, flat_.own_parameters(bucket));
  }
  if (group_.size() > 1) group_.AllGather(gathering(), flat_.whole_parameters(bucket));
  if (overlap_) stream_.Record(*gathered_[bucket]);
  awaited_[bucket] = overlap_;
}

void ParameterGatherer::Updated(int bucket) {
  if (overlap_) {
    compute_.Record(*updated_[bucket]);
    stream_.Wait(*updated_[bucket]);
  }
  if (flat_.parameters_rotate(bucket)) {
    Invalidate(bucket);
    if (first_of_slot_[bucket]) EnsureGathered(bucket);
  } else if (group_.size() > 1) {
    Gather(bucket);
  }
}

void ParameterGatherer::UpdatedBy(kernels::Event& written, int bucket) {
  gathering().Wait(written);
  if (flat_.parameters_rotate(bucket)) {
    Invalidate(bucket);
    if (first_of_slot_[bucket]) EnsureGathered(bucket);
  } else {
    // Recorded with one rank too: the compute stream waits for the event when it needs the bucket.
    Gather(bucket);
  }
}

void ParameterGatherer::Invalidate(int bucket) {
  int& held = held_[flat_.parameter_slot(bucket)];
  if (held == bucket) held = -1;
}

void ParameterGatherer::AllUpdated() {
  for (int i = static_cast<int>(flat_.layout().buckets().size()) - 1; i >= 0; --i) Updated(i);
}

void ParameterGatherer::EnsureGathered(int bucket) {
  const int slot = flat_.parameter_slot(bucket);
  if (held_[slot] == bucket) return;
  if (overlap_) stream_.Wait(*used_[slot]);
  Gather(bucket);
  held_[slot] = bucket;
}

void ParameterGatherer::Await(int bucket) {
  if (!awaited_[bucket]) return;
  if (meter_ != nullptr) meter_->Begin(Exposure::kParameters, Collective::kAllGather, compute_);
  compute_.Wait(*gathered_[bucket]);
  if (meter_ != nullptr) meter_->End(compute_);
  awaited_[bucket] = false;
}

int ParameterGatherer::NextBucket(int block, bool backward) const {
  for (const BlockRange& part : parts_) {
    if (block < part.begin || block >= part.end) continue;
    const int next = backward ? block - 1 : block + 1;
    return next >= part.begin && next < part.end ? BucketOf(next) : -1;
  }
  return -1;
}

void ParameterGatherer::Acquire(int block, BlockWork work) {
  const bool forward = work == BlockWork::kForward || work == BlockWork::kForwardAndGradients;
  if (work != BlockWork::kForward && work != BlockWork::kBackwardInput) {
    reducer_.AcquireBlock(block);
  }
  if (work == BlockWork::kBackwardWeights) return;
  const int bucket = BucketOf(block);
  if (bucket >= 0) EnsureGathered(bucket);
  if (const int next = NextBucket(block, /*backward=*/!forward); next >= 0) EnsureGathered(next);
  for (size_t i = 0; i < awaited_.size(); ++i) {
    const bool needed = flat_.parameters_rotate(static_cast<int>(i)) ? static_cast<int>(i) == bucket
                                                                     : first_block_[i] <= block;
    if (needed) Await(static_cast<int>(i));
  }
}

bool ParameterGatherer::AcquireEarly(absl::Span<const ParameterId> parameters) {
  // Waiting here for the gather of a whole block would overlap with nothing.
  for (const ParameterId id : parameters) {
    if (flat_.parameters_rotate(flat_.layout().bucket_of(id))) return false;
  }
  for (const ParameterId id : parameters) Await(flat_.layout().bucket_of(id));
  return true;
}

void ParameterGatherer::Release(int block, BlockWork work) {
  if (work == BlockWork::kBackwardWeights) return;
  const int bucket = BucketOf(block);
  if (bucket >= 0 && overlap_) compute_.Record(*used_[flat_.parameter_slot(bucket)]);
}

}  // namespace muster::parallel
