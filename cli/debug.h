// What the collectives of a running job are doing, and who is waited for.
#ifndef MUSTER_CLI_DEBUG_H_
#define MUSTER_CLI_DEBUG_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cli/coordinator_client.h"
#include "cli/output.h"
#include "muster/v1/rank.pb.h"

namespace muster::cli {

// One group of ranks, as the records of its members show it.
struct GroupProgress {
  std::string group, path;  // as in v1::Collective
  // The calls that each rank has made so far, by rank. A group that sends and receives counts these
  // too, so its ranks differ by nature and nobody is behind.
  std::map<int, int64_t> calls;
  // The oldest call that is unfinished on some rank, and that rank; null: there is none. Where
  // ranks are behind, of the calls that these have not made.
  const v1::Collective* waits = nullptr;
  int waiting_rank = -1;
  absl::Duration waited;  // by that rank's clock
  // Ranks that have made the fewest calls, where another one waits in a call that they have not
  // made. Without that it is another moment that their record is of, or the host that runs ahead.
  std::vector<int> behind;
};

// In order of path. Ranks without a record are left out; what is returned points into `records`.
std::vector<GroupProgress> Compare(const std::map<int, v1::CollectiveRecord>& records);

struct DebugOptions {
  std::string job;
  bool calls = false;  // every call of every rank, not only what became of each group
  absl::Duration timeout = absl::Seconds(5);
};
// kFailedPrecondition: the job does not run, or not in the engine.
absl::Status Debug(CoordinatorClient& client, const DebugOptions& options, Format format,
                   Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_DEBUG_H_
