// Which transport carries a collective between GPUs of one host: copy engines, or NCCL's kernels.
// Pure: from measured times to a choice that is the same on all ranks.
//
// Only calls that move bytes have a choice. The two transports sum in different orders and types,
// so a choice by time would change the bits of sums from run to run: sums are fixed
// (docs/decisions/0004-measured-transports.md), and their times are only reported.
#ifndef MUSTER_PARALLEL_COMM_TRANSPORT_CHOICE_H_
#define MUSTER_PARALLEL_COMM_TRANSPORT_CHOICE_H_

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::parallel {

enum class Transport { kCopyEngines, kNccl };

// How long one call takes, alone, by each transport.
struct TransportTime {
  int64_t bytes = 0;  // all ranks' parts
  double copy_engines_s = 0;
  double nccl_s = 0;
};

struct TransportTimes {
  std::vector<TransportTime> all_gather;      // ascending sizes
  std::vector<TransportTime> reduce_scatter;  // the same sizes

  // For ranks to tell each other. FromText: kInvalidArgument.
  std::string ToText() const;
  static absl::StatusOr<TransportTimes> FromText(const std::string& text);
};

// A collective lasts until its last rank has finished: the longest time of any rank for each entry.
// kInvalidArgument: the ranks have not timed the same sizes. Requires: at least one rank.
absl::StatusOr<TransportTimes> SlowestOf(const std::vector<TransportTimes>& by_rank);

// Copy engines are preferred while they take at most this many times as long as NCCL alone: beside
// them a GEMM keeps all multiprocessors, while NCCL's kernels hold some until the last rank has
// copied (docs/decisions/0004-measured-transports.md has the steps that decided it).
inline constexpr double kCopyEnginesMayTake = 2;

struct TransportChoice {
  // All-gathers of this many bytes or more go through copy engines, others through NCCL. 0: all
  // that copy engines can carry, which is also the choice where nothing was timed.
  int64_t all_gather_from = 0;

  static constexpr int64_t kNever = INT64_MAX;

  Transport AllGather(int64_t bytes) const {
    return bytes >= all_gather_from ? Transport::kCopyEngines : Transport::kNccl;
  }
  friend bool operator==(const TransportChoice&, const TransportChoice&) = default;
};

// Copy engines from the smallest timed size on from which they are good enough at every larger one.
TransportChoice ChooseTransports(const TransportTimes& times);

// "all-gather by copy engines (4 MiB: 41 us, NCCL 38 us; ...); sums by copy engines, always (...)".
std::string Describe(const TransportChoice& choice, const TransportTimes& times);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_TRANSPORT_CHOICE_H_
