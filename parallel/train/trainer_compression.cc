// The part of Trainer that looks whether compressing gradients is worth its time.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "kernels/device/device.h"
#include "kernels/memory/memory.h"
#include "kernels/random/random.h"
#include "kernels/tensor.h"
#include "parallel/train/failure.h"
#include "parallel/train/trainer.h"

namespace muster::parallel {
namespace {

using kernels::Tensor;

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

absl::Status Trainer::CompareWithDense() {
  if (compressor_ == nullptr || gradient_group().size() == 1) return absl::OkStatus();
  int bucket = -1;
  for (int i = 0; i < static_cast<int>(layout_.buckets().size()); ++i) {
    const FlatLayout::Bucket& candidate = layout_.buckets()[i];
    if (!candidate.compressed) continue;
    if (bucket < 0 || candidate.range.size() > layout_.buckets()[bucket].range.size()) bucket = i;
  }
  if (bucket < 0) return absl::OkStatus();
  const Tensor gradient = flat_->whole_gradients(bucket);
  // Equal values would be selected at another speed.
  std::vector<float> values(gradient.elements());
  const Tensor host(values.data(), kernels::DType::kF32, {gradient.elements()});
  kernels::FillNormal(host, options_.seed, /*stream_id=*/0, /*first=*/0, 0, 1);
  kernels::Copy(*compute_, host, gradient);
  compressor_->BeginStep(options_.compression.warmup_steps + 1);
  ASSIGN_OR_RETURN(double compressed,
                   MedianSeconds(*compute_, [&] { compressor_->Exchange(*compute_, bucket); }));
  ASSIGN_OR_RETURN(double whole, MedianSeconds(*compute_, [&] {
                     if (options_.zero > 0) {
                       gradient_group().ReduceScatter(*compute_, gradient, ReduceOp::kSum);
                     } else {
                       gradient_group().AllReduce(*compute_, gradient, ReduceOp::kSum);
                     }
                   }));
  kernels::Zero(*compute_, gradient);
  compressor_->Reset(*compute_);
  if (world_.rank() != 0 || compressed <= whole) return absl::OkStatus();
  const double bytes = static_cast<double>(gradient.bytes());
  hooks_.OnWarning(absl::FailedPreconditionError(absl::StrFormat(
      "gradient compression slows this job down: %.1f MB of gradients take %.2f ms to compress and "
      "exchange among %d ranks, and %.2f ms to reduce whole, at %.2f GB/s. It is for slower links",
      bytes * 1e-6, compressed * 1e3, gradient_group().size(), whole * 1e3, bytes / whole * 1e-9)));
  return absl::OkStatus();
}

}  // namespace muster::parallel
