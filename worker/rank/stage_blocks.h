// How many blocks each pipeline stage holds, and moving them between stages that need too much
// memory and stages that need less.
#ifndef MUSTER_WORKER_RANK_STAGE_BLOCKS_H_
#define MUSTER_WORKER_RANK_STAGE_BLOCKS_H_

#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include "muster/v1/spec.pb.h"
#include "worker/rank/spec_changes.h"

namespace muster::worker {

// Writes boundaries of PartitionLayers (parallel/pipeline/partition.h), which count the embedding
// and the head as layers, into pipeline_blocks, which does not.
void SetPipelineBlocks(const std::vector<int>& boundaries, v1::ParallelSpec& split);

// A stage, whether it would hold the embedding and the head, and the kinds of the blocks between
// that it would hold, in their order. Ranges of which these are equal need the same memory.
using StageBlocks = std::tuple<int, bool, bool, std::vector<int>>;
struct StageRange {
  int stage = 0, begin = 0, end = 0;  // blocks [begin, end), as in parallel::BlockRange
};
// `kinds`: of the model's blocks between embedding and head (parallel::BlockKinds::of_block).
StageBlocks StageBlocksOf(const StageRange& range, const std::vector<int>& kinds);
// The kinds of the blocks of a model. Requires: a valid spec.
std::vector<int> KindsOf(const v1::ModelSpec& model);

// Remembers what stages need, so that asking for several limits costs little more than for one.
// Single-threaded. `spec` must outlive it, has its defaults and is valid.
class BlockMover {
 public:
  explicit BlockMover(const v1::JobSpec& spec);

  // The change of pipeline_blocks after which every rank needs at most `bytes` (NeededBytes), with
  // the work of the stages as even as that allows. No value: there is none, the job has no
  // pipeline, or its stages hold several model chunks.
  std::optional<SpecChange> Within(int64_t bytes);

 private:
  static constexpr int64_t kTooMuch = std::numeric_limits<int64_t>::max();
  int64_t StageBytes(int stage, int begin, int end);

  const v1::JobSpec& spec_;
  const int stages_;
  const std::vector<int> kinds_;
  std::map<StageBlocks, int64_t> known_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_STAGE_BLOCKS_H_
