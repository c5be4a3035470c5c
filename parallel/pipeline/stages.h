// Decides which blocks of a model each stage of a pipeline holds.
#ifndef MUSTER_PARALLEL_PIPELINE_STAGES_H_
#define MUSTER_PARALLEL_PIPELINE_STAGES_H_

#include <vector>

#include "absl/status/statusor.h"
#include "parallel/model/model.h"

namespace muster::parallel {

// Multiply-adds per token of one forward pass of every block (embedding, transformer blocks, head),
// with the causal half of attention; the backward costs twice as much in every block. The embedding
// only moves memory and counts as zero. kInvalidArgument for a description of no model.
absl::StatusOr<std::vector<double>> BlockCosts(const ModelDescription& description);

// The block ranges of rank `stage` of `stages`, one per chunk, cut by PartitionLayers over the
// estimated costs, so stages are uneven where the head is large. kInvalidArgument when there are
// fewer blocks than stages x chunks.
absl::StatusOr<ModelParallel> StageParts(const ModelDescription& description, int stages,
                                         int chunks, int stage);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_PIPELINE_STAGES_H_
