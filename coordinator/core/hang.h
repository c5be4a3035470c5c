// Which rank of a gang that makes no progress the others wait for. Pure.
#ifndef MUSTER_COORDINATOR_CORE_HANG_H_
#define MUSTER_COORDINATOR_CORE_HANG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"

namespace muster::coordinator {

struct HangVerdict {
  int32_t rank = -1;  // the rank at fault; -1: none stands out
  std::string text;   // what speaks for it, or what all wait for; empty: nothing is known
};

// By rank: `progress`, when its report last changed at all, and `ranks` as users see them. In this
// order:
//   1. a rank does not answer while others do: its process is stopped;
//   2. a rank has made fewer calls in a group than another one that waits there. Of several such
//      ranks, the one at fault waits for nobody itself;
//   3. a rank is at an earlier state or step than all others.
// Method: PyTorch's flight recorder compares the same records
// (docs.pytorch.org/tutorials/unstable/flight_recorder_tutorial.html).
HangVerdict NameCulprit(const std::vector<v1::RankProgress>& progress,
                        const std::vector<absl::Time>& answered,
                        const std::vector<v1::RankStatus>& ranks, absl::Time now);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_HANG_H_
