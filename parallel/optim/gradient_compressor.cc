#include "parallel/optim/gradient_compressor.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "kernels/compression/compression.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/optimizer/reduce.h"
#include "kernels/tensor.h"

namespace muster::parallel {

using kernels::DType;
using kernels::Tensor;

namespace {

constexpr int64_t kWordBits = 32;

bool Matches(absl::string_view pattern, absl::string_view name) {
  const size_t star = pattern.find('*');
  if (star == absl::string_view::npos) return pattern == name;
  if (name.substr(0, star) != pattern.substr(0, star)) return false;
  for (size_t at = star; at <= name.size(); ++at) {
    if (Matches(pattern.substr(star + 1), name.substr(at))) return true;
  }
  return false;
}

Tensor Floats(kernels::Buffer& buffer, int64_t first, int64_t count) {
  return Tensor(static_cast<float*>(buffer.data()) + first, DType::kF32, {count});
}

// The number of elements of a parameter that are sent.
int64_t CountAt(double density, int64_t elements) {
  const double share = std::ceil(density * static_cast<double>(elements));
  return std::clamp<int64_t>(static_cast<int64_t>(share), 1, elements);
}

int64_t SignWords(int64_t elements) { return 1 + (elements + kWordBits - 1) / kWordBits; }

}  // namespace

bool Compresses(const CompressionOptions& options, const Parameter& parameter) {
  if (options.method == CompressionMethod::kNone) return false;
  if (parameter.sharing == TensorSharing::kPartial || parameter.duplicate) return false;
  // Residuals belong to whole tensors.
  if (parameter.in_two) return false;
  // Decided by the whole tensor, so that all tensor ranks agree whatever their shards.
  const Box whole = Box::Whole(parameter.global_shape);
  if (whole.extent.size() < 2 || whole.elements() < options.min_elements) return false;
  return std::none_of(options.exclude.begin(), options.exclude.end(),
                      [&](const std::string& pattern) { return Matches(pattern, parameter.name); });
}

double DensityAt(const CompressionOptions& options, int64_t step) {
  if (step > options.warmup_steps) return options.density;
  return std::pow(options.density,
                  static_cast<double>(step) / static_cast<double>(options.warmup_steps + 1));
}

absl::StatusOr<std::unique_ptr<GradientCompressor>> GradientCompressor::Make(
    const CompressionOptions& options, FlatBuffers& flat, Communicator& group,
    kernels::Stream& stream) {
  CHECK(options.method != CompressionMethod::kNone);
  CHECK_LT(flat.options().zero, 2) << "compression needs whole gradients";
  std::unique_ptr<GradientCompressor> compressor(new GradientCompressor(options, flat, group));
  RETURN_IF_ERROR(compressor->Allocate(stream));
  return compressor;
}

int64_t GradientCompressor::StateBytes(const CompressionOptions& options,
                                       const FlatLayout& layout) {
  int64_t elements = 0;
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    if (bucket.compressed) elements += bucket.range.size();
  }
  return elements * SizeOf(DType::kF32) * (options.momentum > 0 ? 2 : 1);
}

int64_t GradientCompressor::ExchangeBytes(const CompressionOptions& options,
                                          const ParameterRegistry& registry,
                                          const FlatLayout& layout, int ranks) {
  int64_t contribution = 1;  // words of the largest one
  for (const FlatLayout::Bucket& bucket : layout.buckets()) {
    if (!bucket.compressed) continue;
    int64_t elements = 0, words = 0;
    for (const ParameterId id : bucket.parameters) {
      elements += registry.at(id).elements();
      words += SignWords(registry.at(id).elements());
    }
    if (options.method == CompressionMethod::kTopK) {
      words = 2 * PairsMax(options, elements, layout.shards(), ranks);
    }
    contribution = std::max(contribution, words);
  }
  return contribution * ranks * SizeOf(DType::kI32);
}

std::optional<int64_t> GradientCompressor::ContributionBytes(const CompressionOptions& options,
                                                             const ParameterRegistry& registry,
                                                             const FlatLayout& layout, int bucket,
                                                             int ranks, int64_t step) {
  const double density = DensityAt(options, step);
  int64_t elements = 0, words = 0, count = 0;
  for (const ParameterId id : layout.buckets()[bucket].parameters) {
    const int64_t of = registry.at(id).elements();
    elements += of;
    words += SignWords(of);
    count += CountAt(density, of);
  }
  if (options.method == CompressionMethod::kTopK) {
    if (count > PairsMax(options, elements, layout.shards(), ranks)) return std::nullopt;
    words = 2 * count;  // an index and a value
  }
  return words * SizeOf(DType::kI32);
}

absl::Status GradientCompressor::Allocate(kernels::Stream& stream) {
  const FlatLayout& layout = flat_.layout();
  for (const FlatLayout::Bucket& from : layout.buckets()) {
    Bucket& bucket = buckets_.emplace_back();
    if (!from.compressed) continue;
    bucket.begin = residual_elements_;
    residual_elements_ += from.range.size();
    for (const ParameterId id : from.parameters) {
      const int64_t elements = flat_.registry().at(id).elements();
      bucket.members.push_back({layout.offset(id) - from.range.begin, elements, bucket.words});
      bucket.elements += elements;
      bucket.words += SignWords(elements);
    }
    elements_ += bucket.elements;
  }
  kernels::Device& device = stream.device();
  const int64_t bytes = residual_elements_ * SizeOf(DType::kF32);
  const int64_t gathered = ExchangeBytes(options_, flat_.registry(), layout, group_.size());
  const auto allocate = [&](std::unique_ptr<kernels::Buffer>& buffer, int64_t size) {
    auto made = device.Allocate(size);
    if (!made.ok()) {
      return Annotate(made.status(),
                      absl::StrFormat("gradient compression takes %.1f MB for %s and %.1f MB to "
                                      "exchange",
                                      static_cast<double>(StateBytes(options_, layout)) * 1e-6,
                                      options_.momentum > 0 ? "residual and momentum" : "residual",
                                      static_cast<double>(gathered) * 1e-6));
    }
    buffer = *std::move(made);
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(allocate(residual_, bytes));
  if (options_.momentum > 0) RETURN_IF_ERROR(allocate(momentum_, bytes));
  RETURN_IF_ERROR(allocate(gathered_, gathered));
  Reset(stream);
  return absl::OkStatus();
}

void GradientCompressor::Reset(kernels::Stream& stream) {
  for (const auto* buffer : {&residual_, &momentum_}) {
    if (*buffer != nullptr) kernels::Zero(stream, Floats(**buffer, 0, residual_elements_));
  }
}

Tensor GradientCompressor::state(int which, int bucket) {
  CHECK(which >= 0 && which < states());
  return Floats(which == 0 ? *residual_ : *momentum_, buckets_[bucket].begin,
                flat_.layout().buckets()[bucket].range.size());
}

void GradientCompressor::ResidualSquare(kernels::Stream& stream, Tensor out) {
  kernels::SumSquares(stream, Floats(*residual_, 0, residual_elements_), out,
                      /*accumulate=*/false);
}

void GradientCompressor::BeginStep(int64_t step) {
  density_ = DensityAt(options_, step);
  sent_ = 0;
}

int64_t GradientCompressor::PairsMax(const Bucket& bucket) const {
  return PairsMax(options_, bucket.elements, flat_.layout().shards(), group_.size());
}

int64_t GradientCompressor::PairsMax(const CompressionOptions& options, int64_t elements,
                                     int shards, int ranks) {
  const auto all = static_cast<double>(elements);
  if (options.dense_above > 0) {
    return std::min(elements, static_cast<int64_t>(options.dense_above * all));
  }
  // Each of n ranks sends pairs of 8 bytes to n - 1 others, or 4 bytes per element of a part to n -
  // 1 others, twice for an all-reduce.
  const double rounds = shards > 1 ? 1 : 2;
  return static_cast<int64_t>(all * std::min(1.0, rounds / (2.0 * ranks)));
}

void GradientCompressor::Accumulate(kernels::Stream& stream, int bucket) {
  Tensor gradient = flat_.whole_gradients(bucket);
  if (options_.momentum > 0) {
    const Tensor momentum = state(1, bucket);
    kernels::Scale(stream, static_cast<float>(options_.momentum), momentum);
    kernels::Axpy(stream, 1.0f, gradient, momentum);
    gradient = momentum;
  }
  kernels::Axpy(stream, 1.0f, gradient, state(0, bucket));
}

bool GradientCompressor::Exchange(kernels::Stream& stream, int bucket) {
  Accumulate(stream, bucket);
  if (options_.method == CompressionMethod::kTopK) return ExchangeLargest(stream, bucket);
  ExchangeSigns(stream, bucket);
  return true;
}

bool GradientCompressor::ExchangeLargest(kernels::Stream& stream, int bucket) {
  const Bucket& of = buckets_[bucket];
  int64_t count = 0;
  for (const Member& member : of.members) count += CountAt(density_, member.elements);
  sent_ += count;
  const bool pairs = count <= PairsMax(of);
  const Tensor gathered(gathered_->data(), DType::kI32, {group_.size(), 2, count});
  int32_t* own = static_cast<int32_t*>(gathered_->data()) + group_.rank() * 2 * count;
  int64_t at = 0;
  for (const Member& member : of.members) {
    kernels::TakeLargestArgs args;
    args.x = state(0, bucket).Rows(member.begin, member.elements);
    if (momentum_ != nullptr) args.also = state(1, bucket).Rows(member.begin, member.elements);
    args.k = CountAt(density_, member.elements);
    args.offset = member.begin;
    if (pairs) {
      args.indices = Tensor(own + at, DType::kI32, {args.k});
      args.values = Tensor(own + count + at, DType::kF32, {args.k});
    } else {
      args.dense = flat_.whole_gradients(bucket).Rows(member.begin, member.elements);
    }
    at += args.k;
    kernels::TakeLargest(stream, args);
  }
  if (!pairs) return false;
  if (group_.size() > 1) group_.AllGather(stream, gathered);
  const Tensor sum = flat_.own_gradient(bucket);
  kernels::SumSparse(stream, gathered, flat_.options().shard * sum.elements(), sum);
  return true;
}

void GradientCompressor::ExchangeSigns(kernels::Stream& stream, int bucket) {
  const Bucket& of = buckets_[bucket];
  sent_ += of.elements;
  const Tensor gathered(gathered_->data(), DType::kI32, {group_.size(), of.words});
  for (const Member& member : of.members) {
    kernels::TakeSigns(stream, state(0, bucket).Rows(member.begin, member.elements),
                       Tensor(gathered.as<int32_t>() + group_.rank() * of.words + member.words,
                              DType::kI32, {SignWords(member.elements)}));
  }
  if (group_.size() > 1) group_.AllGather(stream, gathered);
  const Tensor sum = flat_.own_gradient(bucket);
  const int64_t first = flat_.options().shard * sum.elements(), last = first + sum.elements();
  kernels::Zero(stream, sum);
  for (const Member& member : of.members) {
    const int64_t begin = std::max(first, member.begin);
    const int64_t end = std::min(last, member.begin + member.elements);
    if (begin >= end) continue;
    const Tensor packed(gathered.as<int32_t>() + member.words, DType::kI32,
                        {group_.size(), SignWords(member.elements)}, {of.words, 1});
    kernels::SumSigns(stream, packed, begin - member.begin, sum.Rows(begin - first, end - begin));
  }
}

}  // namespace muster::parallel
