// Decides which layers each virtual stage of a pipeline holds. Pure.
#ifndef MUSTER_PARALLEL_PIPELINE_PARTITION_H_
#define MUSTER_PARALLEL_PIPELINE_PARTITION_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace muster::parallel {

// Cuts layers 0..n-1, whose costs (seconds, FLOPs: any one unit, >= 0) are `costs`, into `parts`
// contiguous, non-empty ranges such that the most expensive range costs as little as possible.
// The embedding and the head are layers like the others: a head of V columns costs as much as
// V / (12 C) transformer blocks, so the last part gets fewer blocks. Among the best cuts, the one
// with the smallest sum of squares, then the one whose late parts are longest: the first ranks of a
// pipeline keep the most activations.
// Returns parts + 1 boundaries: part i is [result[i], result[i + 1]).
// By dynamic programming, O(parts n^2). kInvalidArgument: fewer layers than parts, or a cost that
// is negative or not finite.
absl::StatusOr<std::vector<int>> PartitionLayers(absl::Span<const double> costs, int parts);

// The best of the cuts in which every range fits: fits(part, begin, end) says whether part `part`
// may hold layers [begin, end); it then may hold every range within these, so that `fits` is asked
// O(parts n) times. A stage that keeps the activations of many micro-batches may thus
// get fewer layers than its share of the work. kFailedPrecondition when no cut fits.
absl::StatusOr<std::vector<int>> PartitionLayersWithin(absl::Span<const double> costs, int parts,
                                                       absl::FunctionRef<bool(int, int, int)> fits);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PIPELINE_PARTITION_H_
