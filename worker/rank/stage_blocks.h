// How many transformer blocks each pipeline stage holds, and moving them between stages that need
// too much memory and stages that need less.
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

// A stage and what blocks it would hold: their number and, where the model's blocks are alike,
// whether they include the embedding and the head; else the first one.
using StageBlocks = std::tuple<int, int, int, bool>;
struct StageRange {
  int stage = 0, begin = 0, end = 0;  // blocks [begin, end), as in parallel::BlockRange
};
// `blocks`: of the model, with embedding and head.
StageBlocks StageBlocksOf(const StageRange& range, int blocks, bool alike);
// Whether all blocks between embedding and head keep, send and cost the same. Requires: a valid
// spec.
bool BlocksAreAlike(const v1::ModelSpec& model);

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
  const bool alike_;  // BlocksAreAlike
  // By stage and the kinds of blocks that it would hold.
  std::map<StageBlocks, int64_t> known_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_STAGE_BLOCKS_H_
