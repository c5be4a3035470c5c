// Divides work by the measured speed of the ranks' devices, for `balance: measured` of the job
// spec.
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

// How long one rank takes for one micro-batch of each kind of layer, and how much memory it has.
struct RankMeasure {
  int stage = 0;     // of the pipeline
  int tensor = 0;    // rank in the tensor group
  double share = 1;  // number of elements of a block that it holds
  // Seconds of forward and backward of that share.
  double embedding = 0, block = 0, head = 0;
  // The same of every kind of block (parallel::KindsOfBlocks), where there are several; `block` is
  // their sum, and `share` counts one of each.
  std::vector<double> kinds;
  int64_t memory_bytes = 0;  // available (memory_check.h); 0: not known
};

// Measures the rank at `coordinate`: the fastest of several runs, without communication. The caller
// fills in memory_bytes. While it runs it takes the memory of one block, the tables and their
// gradients. Requires: `spec` has its defaults and is valid.
absl::StatusOr<RankMeasure> MeasureRank(const v1::JobSpec& spec,
                                        const parallel::PerAxis& coordinate,
                                        kernels::Device& device);

// Fills in pipeline_blocks and tensor_shares where the spec does not give them: stages by the mean
// times of the layers; shares by the speed of the slowest rank at each place in the tensor groups,
// in steps of 1/128 of the fastest place's. Shares stay unset when all places are within 3 % of it,
// which noise alone can explain, or when attention (all_to_all) cannot divide the heads that way. A
// share that needs more memory than its ranks have is reduced until it fits, and so are the blocks
// of a stage with one model chunk. Returns what was reduced, with the numbers, or "". Where nothing
// fits the measured times alone decide; SetUpEngine then refuses the spec and names a change that
// fits.
absl::StatusOr<std::string> Even(const std::vector<RankMeasure>& ranks, v1::JobSpec& spec);

// Whether ranks measure themselves for a spec that has its defaults.
bool Balances(const v1::JobSpec& spec);

// The spec that all ranks use: the given one, or with the layout that rank 0 has decided on from
// the measurements of all ranks, exchanged through `store`. `summary`, for the log, stays empty
// when there was nothing to measure. Failures are marked with a FailureDomain.
absl::StatusOr<v1::JobSpec> BalancedSpec(const v1::RankAssignment& assignment,
                                         parallel::KeyValueStore& store, std::string& summary);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_BALANCE_H_
