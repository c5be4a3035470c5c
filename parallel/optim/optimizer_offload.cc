#include "parallel/optim/optimizer_offload.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/memory/memory.h"

namespace muster::parallel {

using kernels::DType;
using kernels::StepScalars;
using kernels::Tensor;

namespace {

// 16 MB of gradients: large enough for the links and for many threads, small enough for three
// stages to overlap.
constexpr int64_t kSliceElements = int64_t{4} << 20;
constexpr int kSlots = 3;  // one being computed, one being copied up, one in between

}  // namespace

int HostBuckets(const FlatLayout& layout, double share) {
  if (!(share > 0)) return 0;
  const auto wanted =
      static_cast<int64_t>(std::llround(share * static_cast<double>(layout.local_elements())));
  int count = 0;
  int64_t elements = 0;
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    const int64_t part = bucket.range.size() / layout.shards();
    // The bucket at the boundary counts when more than half of it is inside.
    if (count > 0 && elements + part / 2 > wanted) break;
    elements += part;
    ++count;
  }
  return count;
}

absl::StatusOr<std::unique_ptr<OptimizerOffload>> OptimizerOffload::Make(FlatBuffers& flat,
                                                                         const Optimizer& optimizer,
                                                                         kernels::Device& device,
                                                                         int threads) {
  CHECK_GT(flat.options().host_buckets, 0);
  std::unique_ptr<OptimizerOffload> offload(new OptimizerOffload(flat));
  RETURN_IF_ERROR(offload->Allocate(optimizer, device, threads));
  return offload;
}

int64_t OptimizerOffload::HostBytes(const FlatLayout& layout, const FlatBuffersOptions& options) {
  if (options.host_buckets == 0) return 0;
  int64_t elements = 0;
  for (int bucket = 0; bucket < options.host_buckets; ++bucket) {
    elements += layout.buckets()[bucket].range.size() / layout.shards();
  }
  const int64_t slots =
      options.compute == DType::kF32 ? 0 : kSlots * kSliceElements * SizeOf(options.compute);
  return elements * SizeOf(DType::kF32) + slots + static_cast<int64_t>(sizeof(StepScalars));
}

OptimizerOffload::~OptimizerOffload() {
  for (kernels::Stream* stream : {down_.get(), work_.get(), up_.get()}) {
    if (stream != nullptr) stream->Synchronize().IgnoreError();
  }
}

absl::Status OptimizerOffload::Allocate(const Optimizer& optimizer, kernels::Device& device,
                                        int threads) {
  scalars_ = optimizer.scalars();
  host_ = kernels::MakeCpuDevice(threads);
  ASSIGN_OR_RETURN(adamw_, host_->MakeStream());
  int64_t elements = 0;
  for (int bucket = 0; bucket < flat_.options().host_buckets; ++bucket) {
    elements += flat_.m(bucket).elements();
  }
  auto gradients = device.AllocateHost(elements * SizeOf(DType::kF32));
  if (!gradients.ok()) {
    return Annotate(gradients.status(),
                    absl::StrFormat("offloaded gradients take %.1f MB of host memory",
                                    static_cast<double>(4 * elements) * 1e-6));
  }
  gradients_ = *std::move(gradients);
  ASSIGN_OR_RETURN(host_scalars_, device.AllocateHost(sizeof(StepScalars)));
  if (flat_.options().compute != DType::kF32) {
    ASSIGN_OR_RETURN(
        slots_, device.AllocateHost(kSlots * kSliceElements * SizeOf(flat_.options().compute)));
  }
  for (auto* stream : {&down_, &work_, &up_}) {
    ASSIGN_OR_RETURN(*stream, device.MakeStream({.threaded = true}));
  }
  for (auto* event : {&reduced_, &prepared_, &updated_, &slice_updated_}) {
    ASSIGN_OR_RETURN(*event, device.MakeEvent());
  }
  for (int bucket = 0; bucket < flat_.options().host_buckets; ++bucket) {
    for (auto* events : {&fetched_, &written_}) {
      ASSIGN_OR_RETURN(auto event, device.MakeEvent());
      events->push_back(std::move(event));
    }
  }
  for (int slot = 0; slot < kSlots; ++slot) {
    ASSIGN_OR_RETURN(auto event, device.MakeEvent());
    slot_empty_.push_back(std::move(event));
  }
  MakeSlices(optimizer.options().adamw);
  return absl::OkStatus();
}

Tensor OptimizerOffload::gradients(int bucket) {
  return Tensor(static_cast<float*>(gradients_->data()) + flat_.layout().buckets()[bucket].local,
                DType::kF32, {flat_.m(bucket).elements()});
}

void OptimizerOffload::MakeSlices(const AdamWConfig& config) {
  const FlatLayout& layout = flat_.layout();
  for (int bucket = flat_.options().host_buckets - 1; bucket >= 0; --bucket) {
    const FlatRange part = layout.Part(bucket, flat_.options().shard);
    const DType compute = flat_.compute(bucket);
    for (int64_t begin = 0; begin < part.size(); begin += kSliceElements) {
      const int64_t count = std::min(kSliceElements, part.size() - begin);
      Slice slice;
      slice.bucket = bucket;
      slice.master = flat_.master(bucket).Rows(begin, count);
      slice.sent = slice.master;
      slice.to = flat_.copy(bucket).Rows(begin, count);
      if (compute != DType::kF32) {
        slice.slot = static_cast<int>(slices_.size()) % kSlots;
        slice.sent = Tensor(
            static_cast<char*>(slots_->data()) + slice.slot * kSliceElements * SizeOf(compute),
            compute, {count});
      }
      int64_t end = 0;  // end of the range that is covered so far
      const auto skip_to = [&](int64_t next) {
        if (slice.slot >= 0 && next > end) slice.gaps.push_back({end, next - end});
      };
      for (const FlatSlice& of_parameter :
           layout.Slices({part.begin + begin, part.begin + begin + count})) {
        const int64_t at = of_parameter.flat - part.begin;
        skip_to(at - begin);
        end = at - begin + of_parameter.count;
        kernels::AdamWArgs args;
        args.parameter = flat_.master(bucket).Rows(at, of_parameter.count);
        args.gradient = gradients(bucket).Rows(at, of_parameter.count);
        args.m = flat_.m(bucket).Rows(at, of_parameter.count);
        args.v = flat_.v(bucket).Rows(at, of_parameter.count);
        if (slice.slot >= 0) args.copy = slice.sent.Rows(at - begin, of_parameter.count);
        args.beta1 = static_cast<float>(config.beta1);
        args.beta2 = static_cast<float>(config.beta2);
        args.epsilon = static_cast<float>(config.epsilon);
        args.weight_decay = flat_.registry().at(of_parameter.parameter).weight_decay
                                ? static_cast<float>(config.weight_decay)
                                : 0.0f;
        args.scalars = static_cast<const StepScalars*>(host_scalars_->data());
        slice.updates.push_back(args);
      }
      skip_to(count);
      slices_.push_back(std::move(slice));
    }
  }
}

void OptimizerOffload::FetchGradients(kernels::Stream& compute,
                                      absl::FunctionRef<kernels::Event*(int bucket)> reduced) {
  compute.Record(*reduced_);
  // Waits until the host has read the previous gradients.
  down_->Wait(*updated_);
  // In the order of backward.
  for (int bucket = 0; bucket < flat_.options().host_buckets; ++bucket) {
    kernels::Event* const earlier = reduced(bucket);
    down_->Wait(earlier != nullptr ? *earlier : *reduced_);
    kernels::Copy(*down_, flat_.own_gradient(bucket), gradients(bucket));
    down_->Record(*fetched_[bucket]);
  }
}

void OptimizerOffload::Round(const Slice& slice, int64_t begin, int64_t count) {
  const Tensor from = slice.master.Rows(begin, count), to = slice.sent.Rows(begin, count);
  if (to.dtype() == DType::kBF16) {
    kernels::SplitMaster(*adamw_, from, to, Tensor());
  } else {
    kernels::Cast(*adamw_, from, to);
  }
}

void OptimizerOffload::Run(const Slice& slice) {
  for (const kernels::AdamWArgs& update : slice.updates) kernels::AdamW(*adamw_, update);
  if (slice.slot < 0) return;
  if (static_cast<const StepScalars*>(host_scalars_->data())->skip != 0) {
    // AdamW has left the slot as it was, with another slice in it.
    return Round(slice, 0, slice.master.elements());
  }
  for (const auto& [begin, count] : slice.gaps) Round(slice, begin, count);
}

void OptimizerOffload::Update(kernels::Stream& compute) {
  const int64_t size = sizeof(StepScalars);
  compute.Record(*prepared_);
  down_->Wait(*prepared_);
  kernels::Copy(*down_, Tensor(const_cast<StepScalars*>(scalars_), DType::kU8, {size}),
                Tensor(host_scalars_->data(), DType::kU8, {size}));
  // The scalars are copied behind the gradients on the same stream, so when they have arrived the
  // device may overwrite the gradients.
  down_->Record(*prepared_);
  work_->Wait(*prepared_);
  compute.Wait(*prepared_);
  for (size_t i = 0; i < slices_.size(); ++i) {
    const Slice& slice = slices_[i];
    work_->Wait(*fetched_[slice.bucket]);
    // Waits until the last step's copy from this memory, a slot or the master itself, is complete.
    work_->Wait(slice.slot >= 0 ? *slot_empty_[slice.slot] : *written_[slice.bucket]);
    work_->Enqueue([this, &slice] { Run(slice); });
    work_->Record(*slice_updated_);
    up_->Wait(*slice_updated_);
    kernels::Copy(*up_, slice.sent, slice.to);
    if (slice.slot >= 0) up_->Record(*slot_empty_[slice.slot]);
    const bool last = i + 1 == slices_.size() || slices_[i + 1].bucket != slice.bucket;
    if (last) up_->Record(*written_[slice.bucket]);
  }
  work_->Record(*updated_);
}

void OptimizerOffload::Join(kernels::Stream& compute) {
  compute.Wait(*updated_);
  for (const auto& written : written_) compute.Wait(*written);
}

absl::Status OptimizerOffload::status() const {
  for (const auto* stream : {&down_, &work_, &up_}) RETURN_IF_ERROR((*stream)->status());
  return adamw_->status();
}

}  // namespace muster::parallel
