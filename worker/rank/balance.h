// Work evened out by what it takes on the ranks' own devices: balance: measured of the job spec.
#ifndef MUSTER_WORKER_RANK_BALANCE_H_
#define MUSTER_WORKER_RANK_BALANCE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/spec.pb.h"
#include "parallel/comm/communicator.h"
#include "parallel/mesh/mesh.h"

namespace muster::worker {

// What one rank takes for one micro-batch of each kind of layer, and what it has.
struct RankMeasure {
  int stage = 0;     // of the pipeline
  int tensor = 0;    // its place in the tensor group
  double share = 1;  // elements of a transformer block that it holds
  // Seconds, forward and backward, of that share.
  double embedding = 0, block = 0, head = 0;
  int64_t memory_bytes = 0;  // for all that job_plan.h counts (NeededBytes); 0: not known
};

// Of the rank at `coordinate`: the fastest of several runs, without communication; its memory is
// the caller's to fill in. Takes the memory of one block, the tables and their gradients while it
// runs. Requires: `spec` has its defaults and is valid.
absl::StatusOr<RankMeasure> MeasureRank(const v1::JobSpec& spec,
                                        const parallel::PerAxis& coordinate,
                                        kernels::Device& device);

// Fills in pipeline_blocks and tensor_shares where they are not given: stages by the mean times of
// the layers, shares by the speed of the slowest rank at each place of a tensor group, in
// sixteenths of the fastest place's; none when all are the same, or when attention (all_to_all)
// could not share out the heads that they come to. A place whose share would need
// more memory than its ranks have gets as much less as that takes, and a stage of one part fewer
// blocks; returns what gave way, with the numbers, or "". Where nothing fits, times alone decide:
// SetUpEngine refuses it with what would.
absl::StatusOr<std::string> Even(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec);

// Whether ranks measure themselves for a spec that has its defaults.
bool Balances(const v1::JobSpec& spec);

// The spec that all ranks go on with: as it is, or with what they have measured together through
// `store`, where rank 0 collects and decides. `summary`, for the log, stays empty when there was
// nothing to measure. Marked with a FailureDomain.
absl::StatusOr<v1::JobSpec> BalancedSpec(const v1::RankAssignment& assignment,
                                         parallel::KeyValueStore& store, std::string& summary);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_BALANCE_H_
