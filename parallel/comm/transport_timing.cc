#include "parallel/comm/transport_timing.h"

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "parallel/comm/gather_texts.h"

namespace muster::parallel {
namespace {

using kernels::DType;
using kernels::Tensor;

constexpr std::array<int64_t, 3> kSizes = {int64_t{4} << 20, int64_t{16} << 20, int64_t{64} << 20};
constexpr int kRounds = 3;  // of which the fastest counts
constexpr int kCallsPerRound = 4;
// Parts that are summed are rounded up to whole lines of memory.
constexpr int64_t kSumsSlack = int64_t{1} << 20;

// The least that any rank has.
absl::StatusOr<int64_t> Least(Communicator& host, int64_t mine) {
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(host, absl::StrCat(mine)));
  int64_t least = mine;
  for (const std::string& text : texts) {
    int64_t theirs = 0;
    if (absl::SimpleAtoi(text, &theirs)) least = std::min(least, theirs);
  }
  return least;
}

// What one rank times with.
struct Bench {
  const TransportTiming& timing;
  std::unique_ptr<kernels::Buffer> out, sums;
  std::unique_ptr<kernels::Stream> stream;
  std::unique_ptr<kernels::Event> begin, end;

  absl::Status Make(int64_t bytes) {
    ASSIGN_OR_RETURN(out, timing.device.Allocate(bytes));
    ASSIGN_OR_RETURN(sums, timing.device.Allocate(bytes + kSumsSlack));
    ASSIGN_OR_RETURN(stream, timing.device.MakeStream());
    ASSIGN_OR_RETURN(begin, timing.device.MakeEvent(/*timing=*/true));
    ASSIGN_OR_RETURN(end, timing.device.MakeEvent(/*timing=*/true));
    return absl::OkStatus();
  }

  // Seconds of a call. The first one, which opens connections, does not count.
  absl::StatusOr<double> Time(absl::FunctionRef<void()> call) {
    double fastest = std::numeric_limits<double>::infinity();
    for (int round = 0; round <= kRounds; ++round) {
      RETURN_IF_ERROR(timing.host.Barrier());
      stream->Record(*begin);
      for (int i = 0; i < kCallsPerRound; ++i) call();
      stream->Record(*end);
      RETURN_IF_ERROR(stream->Synchronize());
      if (round > 0) fastest = std::min(fastest, end->SecondsSince(*begin) / kCallsPerRound);
    }
    return fastest;
  }

  absl::Status Run(int64_t bytes, TransportTimes& times) {
    Communicator& group = timing.group;
    const int64_t elements = bytes / SizeOf(DType::kF32), part = elements / group.size();
    const auto tensor = [](void* data, int64_t count) {
      return Tensor(data, DType::kF32, {count});
    };
    const Tensor part_in = tensor(timing.shared.data(), part);
    const Tensor all_in = tensor(timing.shared.data(), part * group.size());
    const Tensor part_out = tensor(out->data(), part);
    const Tensor all_out = tensor(out->data(), part * group.size());
    TransportTime gather = {bytes, 0, 0}, scatter = {bytes, 0, 0};
    for (const Transport transport : {Transport::kNccl, Transport::kCopyEngines}) {
      timing.force(transport);
      const bool engines = transport == Transport::kCopyEngines;
      ASSIGN_OR_RETURN((engines ? gather.copy_engines_s : gather.nccl_s),
                       Time([&] { group.AllGatherFrom(*stream, part_in, all_out); }));
      ASSIGN_OR_RETURN((engines ? scatter.copy_engines_s : scatter.nccl_s), Time([&] {
                         group.ReduceScatterTo(*stream, all_in, part_out, ReduceOp::kSum);
                       }));
    }
    times.all_gather.push_back(gather);
    times.reduce_scatter.push_back(scatter);
    return absl::OkStatus();
  }
};

}  // namespace

absl::StatusOr<TransportTimes> TimeTransports(const TransportTiming& timing) {
  ASSIGN_OR_RETURN(const int64_t fits,
                   Least(timing.host, timing.shared.empty() ? 0 : timing.shared.bytes()));
  std::vector<int64_t> sizes;
  for (const int64_t size : kSizes) {
    if (size <= fits && size >= timing.least_bytes) sizes.push_back(size);
  }
  TransportTimes times;
  if (sizes.empty()) return times;
  Bench bench{timing};
  const absl::Status made = bench.Make(sizes.back());
  ASSIGN_OR_RETURN(const int64_t all_made, Least(timing.host, made.ok() ? 1 : 0));
  if (all_made == 0) return times;
  timing.use_for_sums(Tensor(bench.sums->data(), DType::kU8, {bench.sums->bytes()}));
  for (const int64_t size : sizes) RETURN_IF_ERROR(bench.Run(size, times));
  ASSIGN_OR_RETURN(const std::vector<std::string> texts, GatherTexts(timing.host, times.ToText()));
  std::vector<TransportTimes> by_rank;
  for (const std::string& text : texts) {
    ASSIGN_OR_RETURN(by_rank.emplace_back(), TransportTimes::FromText(text));
  }
  return SlowestOf(by_rank);
}

}  // namespace muster::parallel
