#include "parallel/train/gradient_reduction.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/random/random.h"
#include "kernels/tensor.h"
#include "parallel/train/failure.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

GradientReduction::GradientReduction(const TrainerInputs& inputs, RankMemory& memory)
    : inputs_(inputs), memory_(memory), groups_(GradientGroupsOf(inputs.place())) {}

absl::StatusOr<std::unique_ptr<GradientReduction>> GradientReduction::Make(
    const TrainerInputs& inputs, RankMemory& memory, MeteredGroups& groups) {
  std::unique_ptr<GradientReduction> reduction(new GradientReduction(inputs, memory));
  const CompressionOptions& compression = inputs.options.compression;
  if (compression.method != CompressionMethod::kNone) {
    ASSIGN_OR_RETURN(reduction->compressor_,
                     GradientCompressor::Make(compression, memory.flat(), inputs.gradient_group(),
                                              memory.compute()));
    ASSIGN_OR_RETURN(reduction->residual_square_, inputs.device.Allocate(sizeof(float)));
  }
  if (const int kv_group = inputs.model.shape().kv_group; kv_group >= 0) {
    ASSIGN_OR_RETURN(reduction->sharers_,
                     inputs.groups.Along({Axis::kTensor})
                         .Split(kv_group, inputs.groups.coordinate()[Axis::kTensor], "kv"));
  }
  RETURN_IF_ERROR(reduction->MakeReducers(groups));
  RETURN_IF_ERROR(reduction->AllocateTiedTable());
  return reduction;
}

absl::Status GradientReduction::MakeReducers(MeteredGroups& groups) {
  const ParameterRegistry& parameters = inputs_.model.parameters();
  const std::vector<FlatLayout::Bucket>& buckets = memory_.layout().buckets();
  GradientReducerOptions reducing = {.overlap = inputs_.options.overlap,
                                     .wire = inputs_.options.gradient_wire,
                                     .overwritten = overwrites(),
                                     .chained = inputs_.options.chain_micro_batches,
                                     .sharers = sharers_.get(),
                                     .compressor = compressor_.get(),
                                     .meter = &groups.meter};
  reducers_.resize(groups_.size());
  // Buckets are in the order of backward, so the last group has the first ones.
  for (size_t group = reducers_.size(); group-- > 0;) {
    const auto of_earlier_group = [&](const FlatLayout::Bucket& bucket) {
      return parameters.at(bucket.parameters.front()).block < groups_[group].begin;
    };
    reducing.last_bucket = static_cast<int>(
        std::find_if(buckets.begin(), buckets.end(), of_earlier_group) - buckets.begin());
    ASSIGN_OR_RETURN(reducers_[group],
                     GradientReducer::Make(memory_.flat(), inputs_.groups, memory_.compute(),
                                           memory_.communication(), reducing));
    reducing.first_bucket = reducing.last_bucket;
  }
  return absl::OkStatus();
}

bool GradientReduction::overwrites() const {
  const TrainerOptions& options = inputs_.options;
  // With shards, backward leaves the padding as it is, so the buffers must begin with zeros, unless
  // the padding may hold anything.
  const bool any_padding = options.zero == 0 || memory_.flat().options().share_gradients;
  const bool adds = options.chain_micro_batches && options.zero < 2 && inputs_.micro_batches() > 1;
  // A backward in two calls adds in the second one.
  return any_padding && !adds && !inputs_.model.shape().split_backward;
}

void GradientReduction::BeginStep(int64_t step) {
  if (compressor_ != nullptr) compressor_->BeginStep(step);
  for (const auto& reducer : reducers_) reducer->BeginStep(inputs_.micro_batches());
}

void GradientReduction::GradientReady(ParameterId parameter) {
  const int block = inputs_.model.parameters().at(parameter).block;
  size_t group = 0;
  while (group + 1 < groups_.size() && groups_[group + 1].begin <= block) ++group;
  reducers_[group]->GradientReady(parameter);
}

void GradientReduction::Finish() {
  for (const auto& reducer : reducers_) reducer->Finish();
  SumTiedTable();
}

kernels::Event* GradientReduction::reduced(int bucket) const {
  if (bucket == tied_bucket_) return nullptr;  // SumTiedTable() changes it in Finish()
  for (const auto& reducer : reducers_) {
    if (kernels::Event* const reduced = reducer->reduced(bucket); reduced != nullptr) {
      return reduced;
    }
  }
  return nullptr;
}

absl::Status GradientReduction::AllocateTiedTable() {
  const ParameterRegistry& parameters = inputs_.model.parameters();
  for (ParameterId id = 0; id < parameters.size(); ++id) {
    if (!parameters.at(id).on_two_stages) continue;
    CHECK_EQ(tied_bucket_, -1) << "one table is tied";
    tied_bucket_ = memory_.layout().bucket_of(id);
    ASSIGN_OR_RETURN(tied_,
                     inputs_.device.Allocate(memory_.flat().own_gradient(tied_bucket_).bytes()));
  }
  return absl::OkStatus();
}

void GradientReduction::SumTiedTable() {
  if (tied_ == nullptr) return;
  Communicator& pipeline = inputs_.groups.Along({Axis::kPipeline});
  kernels::Stream& compute = memory_.compute();
  const int other = pipeline.rank() == 0 ? pipeline.size() - 1 : 0;
  const Tensor mine = memory_.flat().own_gradient(tied_bucket_);
  const Tensor theirs = Floats(*tied_, 0, mine.elements());
  pipeline.GroupBegin();
  pipeline.Send(compute, mine, other);
  pipeline.Receive(compute, theirs, other);
  pipeline.GroupEnd(compute);
  // A sum of two has the same bits on both sides.
  kernels::Axpy(compute, 1.0f, theirs, mine);
}

double GradientReduction::density() const {
  if (compressor_ == nullptr || compressor_->elements() == 0) return 1;
  return static_cast<double>(compressor_->sent()) / static_cast<double>(compressor_->elements());
}

void GradientReduction::CopyResidualSquare(float* host) {
  compressor_->ResidualSquare(memory_.compute(), Floats(*residual_square_, 0, 1));
  kernels::Copy(memory_.compute(), Floats(*residual_square_, 0, 1), Tensor(host, DType::kF32, {1}));
}

void GradientReduction::Carry(std::vector<Carried> carried,
                              std::unique_ptr<kernels::Buffer> memory) {
  carried_ = std::move(carried);
  carried_memory_ = std::move(memory);
}

// The gradients are sums over all ranks already, and each rank adds the same values to them.
void GradientReduction::AddCarried() {
  for (const Carried& slice : carried_) {
    const Tensor own = memory_.flat().own_gradient(slice.bucket);
    kernels::Axpy(memory_.compute(), 1.0f, slice.elements,
                  own.Rows(slice.begin, slice.elements.elements()));
  }
  carried_.clear();
}

void GradientReduction::ReleaseCarried() {
  if (carried_.empty()) carried_memory_.reset();
}

int64_t GradientReduction::bytes_sent() const {
  Communicator& shard = inputs_.groups.shard();
  Communicator& replicate = inputs_.groups.replicate();
  Communicator& whole = inputs_.gradient_group();
  const bool counted = &whole == &shard || &whole == &replicate;
  return shard.bytes_sent() + replicate.bytes_sent() + (counted ? 0 : whole.bytes_sent());
}

namespace {

constexpr int kRepetitions = 3;  // after one to warm up

// The median of several runs of `body`, which enqueues on `stream`.
template <typename Body>
absl::StatusOr<double> MedianSeconds(kernels::Stream& stream, Body body) {
  std::array<double, kRepetitions> seconds{};
  for (int i = -1; i < kRepetitions; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    RETURN_IF_ERROR(Mark(stream.Synchronize(), FailureDomain::kCommunication));
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (i >= 0) seconds[i] = took.count();
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[kRepetitions / 2];
}

}  // namespace

absl::Status GradientReduction::CompareWithDense() {
  Communicator& group = inputs_.gradient_group();
  if (compressor_ == nullptr || group.size() == 1) return absl::OkStatus();
  const std::vector<FlatLayout::Bucket>& buckets = memory_.layout().buckets();
  int largest = -1;
  for (int i = 0; i < static_cast<int>(buckets.size()); ++i) {
    if (!buckets[i].compressed) continue;
    if (largest < 0 || buckets[i].range.size() > buckets[largest].range.size()) largest = i;
  }
  if (largest < 0) return absl::OkStatus();
  kernels::Stream& compute = memory_.compute();
  const Tensor gradient = memory_.flat().whole_gradients(largest);
  // Random values: equal ones would be selected at another speed.
  std::vector<float> values(gradient.elements());
  const Tensor host(values.data(), DType::kF32, {gradient.elements()});
  kernels::FillNormal(host, inputs_.options.seed, /*stream_id=*/0, /*first=*/0, 0, 1);
  kernels::Copy(compute, host, gradient);
  compressor_->BeginStep(inputs_.options.compression.warmup_steps + 1);
  ASSIGN_OR_RETURN(double compressed,
                   MedianSeconds(compute, [&] { compressor_->Exchange(compute, largest); }));
  ASSIGN_OR_RETURN(double whole, MedianSeconds(compute, [&] {
                     if (inputs_.options.zero > 0) {
                       group.ReduceScatter(compute, gradient, ReduceOp::kSum);
                     } else {
                       group.AllReduce(compute, gradient, ReduceOp::kSum);
                     }
                   }));
  kernels::Zero(compute, gradient);
  compressor_->Reset(compute);
  if (inputs_.world().rank() != 0 || compressed <= whole) return absl::OkStatus();
  const auto bytes = static_cast<double>(gradient.bytes());
  inputs_.hooks.OnWarning(absl::FailedPreconditionError(absl::StrFormat(
      "gradient compression slows this job down: %.1f MB of gradients take %.2f ms to compress and "
      "exchange among %d ranks, and %.2f ms to reduce whole, at %.2f GB/s. It is for slower links",
      bytes * 1e-6, compressed * 1e3, group.size(), whole * 1e3, bytes / whole * 1e-9)));
  return absl::OkStatus();
}

}  // namespace muster::parallel
