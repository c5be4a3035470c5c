// Which ranks of a gang compute longer than others that do the same work, so that all wait.
#ifndef MUSTER_COORDINATOR_CORE_SLOW_RANKS_H_
#define MUSTER_COORDINATOR_CORE_SLOW_RANKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

struct SlowRank {
  int32_t rank = -1;
  double slowdown = 0;  // of its mean seconds of computing to the median of its peers
};

// Ranks report where the time of their last step went; what is left of a step without waiting is
// computing. Peers are the ranks with the same number in `peers`: one needs at least one other. A
// rank is slow when it has computed kSlowdown times as long as the median of its peers in each of
// kSlowWindows windows in a row, and the gang has waited for kWaitingShare of its time or more in
// each. Of two peers, that is one that takes 1.5 times as long as the other. The alert
// MusterStraggler has the same limits.
//
// In memory only: it begins anew with each attempt, and after a restart of the coordinator. A
// report costs O(1), the end of a window O(ranks log ranks). Thread: the owner's.
class SlowRanks {
 public:
  static constexpr absl::Duration kWindow = absl::Minutes(10);
  static constexpr int kSlowWindows = 3;
  static constexpr double kSlowdown = 1.2;
  static constexpr double kWaitingShare = 0.05;
  // Fewer steps of a rank in a window say nothing of it.
  static constexpr int kStepsMin = 3;

  explicit SlowRanks(int ranks = 0) : ranks_(static_cast<size_t>(ranks)) {}

  // Of the rank's last step; one that is known, or took no time, is left out.
  void Add(int rank, const v1::StepTimes& times, absl::Time now);
  // Whether a window has ended, so that Judge has something to say.
  bool Due(absl::Time now) const { return now - begin_ >= kWindow; }
  // Ends the window and begins another. Returns the ranks that have become slow in it, ascending: a
  // rank that stays slow is not returned again. Requires: `peers` has a number for each rank.
  std::vector<SlowRank> Judge(const std::vector<int32_t>& peers, absl::Time now);

 private:
  struct Times {
    int64_t last_step = 0;
    int32_t steps = 0;         // in this window
    double computing = 0;      // seconds in this window
    int32_t slow_windows = 0;  // in a row
  };

  std::vector<Times> ranks_;
  absl::Time begin_ = absl::InfiniteFuture();  // of the window; InfiniteFuture before the first
  double waiting_ = 0;                         // seconds of all ranks in this window
  double total_ = 0;
};

// By rank: the lowest rank that does the same work by the layout, which differs in its data and
// context coordinate alone, and has a device of the same model. `models` are by rank. Where the
// degrees do not multiply to the ranks, none has a peer. Requires: `spec` is of an attempt of so
// many ranks (spec::AtSize).
std::vector<int32_t> PeersOf(const v1::JobSpec& spec, const std::vector<std::string>& models);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_SLOW_RANKS_H_
