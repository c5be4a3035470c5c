#include "parallel/context/context_attention.h"

#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "parallel/context/methods.h"
#include "parallel/context/sequence_layout.h"

namespace muster::parallel {

const char* Name(ContextMethod method) {
  switch (method) {
    case ContextMethod::kRing:
      return "ring";
    case ContextMethod::kAllGather:
      return "all_gather";
    case ContextMethod::kAllToAll:
      return "all_to_all";
  }
  return "unknown";
}

const char* Name(ScanMethod method) {
  return method == ScanMethod::kAllToAll ? "all_to_all" : "state_passing";
}

absl::Status Validate(const ContextShape& shape) {
  if (shape.ranks < 1 || shape.batch < 1 || shape.sequence < 1 || shape.heads < 1 ||
      shape.key_heads < 1 || shape.width < 1) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "context parallelism over %d ranks: batch %d, sequence %d, heads %d, key/value heads %d, "
        "head width %d: each must be at least 1",
        shape.ranks, shape.batch, shape.sequence, shape.heads, shape.key_heads, shape.width));
  }
  if (shape.sequence % (2 * shape.ranks) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a sequence of %d tokens cannot be cut into two equal chunks for each of %d ranks; it must "
        "be a multiple of %d",
        shape.sequence, shape.ranks, 2 * shape.ranks));
  }
  if (shape.heads % shape.key_heads != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%d heads are no multiple of %d key/value heads", shape.heads, shape.key_heads));
  }
  if (shape.method == ContextMethod::kAllToAll &&
      (shape.heads % shape.ranks != 0 ||
       (shape.key_heads % shape.ranks != 0 && shape.ranks % shape.key_heads != 0))) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "all_to_all spreads %d heads and %d key/value heads over %d ranks: the heads must be a "
        "multiple of the ranks, and of key/value heads and ranks one a multiple of the other; ring "
        "and all_gather take any heads",
        shape.heads, shape.key_heads, shape.ranks));
  }
  return absl::OkStatus();
}

int HeadGroups(const ContextShape& shape) {
  // Rows of a group's attention over all heads. A thousand tiles of 128 fill a GPU several times.
  constexpr int64_t kLeastRows = int64_t{1} << 17;
  if (shape.method != ContextMethod::kAllToAll || shape.key_heads % (2 * shape.ranks) != 0 ||
      shape.head_groups == 1) {
    return 1;
  }
  const int64_t rows = shape.batch * shape.sequence * (shape.heads / shape.ranks) / 2;
  return shape.head_groups >= 2 || rows >= kLeastRows ? 2 : 1;
}

std::vector<int32_t> ContextPositions(int64_t sequence, int rank, int ranks) {
  return SequenceLayout::Zigzag(ranks).Positions(sequence, rank);
}

absl::StatusOr<std::unique_ptr<ContextOverlap>> ContextOverlap::Make(kernels::Device& device) {
  auto overlap = std::make_unique<ContextOverlap>();
  ASSIGN_OR_RETURN(overlap->stream, device.MakeStream({.threaded = true, .high_priority = true}));
  ASSIGN_OR_RETURN(overlap->ready, device.MakeEvent());
  for (int i = 0; i < 2; ++i) {
    ASSIGN_OR_RETURN(overlap->arrived[i], device.MakeEvent());
    ASSIGN_OR_RETURN(overlap->returned[i], device.MakeEvent());
  }
  return overlap;
}

namespace context {

void StartExchange(const ContextAttention::Call& call, kernels::Event* done,
                   absl::FunctionRef<void(kernels::Stream& stream)> exchange) {
  if (done == nullptr) return exchange(call.stream);
  ContextOverlap& overlap = *call.overlap;
  call.stream.Record(*overlap.ready);
  overlap.stream->Wait(*overlap.ready);
  exchange(*overlap.stream);
  overlap.stream->Record(*done);
}

void AwaitExchange(const ContextAttention::Call& call, kernels::Event* done,
                   Collective collective) {
  if (done == nullptr) return;
  ExposureMeter* const meter = call.overlap->meter;
  if (meter != nullptr) meter->Begin(Exposure::kContext, collective, call.stream);
  call.stream.Wait(*done);
  if (meter != nullptr) meter->End(call.stream);
}

}  // namespace context

absl::StatusOr<std::unique_ptr<ContextAttention>> MakeContextAttention(const ContextShape& shape) {
  RETURN_IF_ERROR(Validate(shape));
  switch (shape.method) {
    case ContextMethod::kRing:
      return context::MakeRing(shape);
    case ContextMethod::kAllGather:
      return context::MakeAllGather(shape);
    case ContextMethod::kAllToAll:
      return context::MakeAllToAll(shape);
  }
  return absl::InvalidArgumentError("unknown method of context parallelism");
}

}  // namespace muster::parallel
