// `muster debug`: what the collectives of a running job are doing, and which ranks the others wait
// for.
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

// One group of ranks, according to the records of its members.
struct GroupProgress {
  std::string group, path;  // as in v1::Collective
  // The number of calls that each rank has made so far, by rank. Sends and receives count too;
  // ranks of a group that has them make different numbers of calls, so that none of them is
  // `behind`.
  std::map<int, int64_t> calls;
  // The oldest call that is unfinished on a rank, and that rank; null: there is none. Where ranks
  // are behind, the oldest of the calls that those have not made.
  const v1::Collective* waits = nullptr;
  int waiting_rank = -1;
  absl::Duration waited;  // since it was enqueued, by that rank's clock
  // The ranks that have made the fewest calls, if another rank waits in a call that they have not
  // made. Otherwise fewer calls only mean that a record was made earlier, or that a host enqueues
  // ahead.
  std::vector<int> behind;
};

// The groups that have recorded calls, by path. Points into `records`, which has the records by
// rank.
std::vector<GroupProgress> Compare(const std::map<int, v1::CollectiveRecord>& records);

struct DebugOptions {
  std::string job;
  bool calls = false;  // print every call of every rank instead of a line for each group
  absl::Duration timeout = absl::Seconds(5);
};
// kFailedPrecondition: the job does not run, or not in the engine.
absl::Status Debug(CoordinatorClient& client, const DebugOptions& options, Format format,
                   Terminal& terminal);

}  // namespace muster::cli

#endif  // MUSTER_CLI_DEBUG_H_
