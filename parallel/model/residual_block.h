// A block of the residual stream: layers of a norm and a mixer each, in every schedule of forward
// and backward. It is the unit that ZeRO gathers, pipelines place, recompute and offload work on.
//
// Kept for backward per token, without recompute: of each layer the residual sum, the norm's output
// (C each), the norm's fp32 statistics, and what its mixer keeps.
#ifndef MUSTER_PARALLEL_MODEL_RESIDUAL_BLOCK_H_
#define MUSTER_PARALLEL_MODEL_RESIDUAL_BLOCK_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "parallel/model/dropout.h"
#include "parallel/model/mixer.h"
#include "parallel/model/model.h"
#include "parallel/model/norm.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

struct ResidualLayer {
  Norm norm;
  std::unique_ptr<Mixer> mixer;
  Dropout dropout;  // of the mixer's branch
};

struct ResidualBlockSpec {
  std::string name;
  int64_t hidden = 0;
  TensorShard shard;
  Recomputed recomputed;
  Recomputed behind;  // what the block recomputes whose backward comes next
  bool split_backward = false;
  bool offload = false;
  // The most residual sums within one block of the model: one less than its layers. Every block
  // puts its own at the front of its recomputed memory, where no block writes anything else,
  // because a sum is read until the first norm of the next block.
  int inner_sums = 1;
};

// Requires: at least one layer, at most inner_sums + 1.
std::unique_ptr<Block> MakeResidualBlock(const ResidualBlockSpec& spec,
                                         std::vector<ResidualLayer> layers);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_RESIDUAL_BLOCK_H_
