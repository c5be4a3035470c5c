// Causal attention with grouped keys and values: the projection to queries, keys and values,
// rotary positions, scores, and the projection of the heads' outputs.
#ifndef MUSTER_PARALLEL_MODEL_ATTENTION_MIXER_H_
#define MUSTER_PARALLEL_MODEL_ATTENTION_MIXER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/model/mixer.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

struct AttentionSpec {
  std::string name;  // of the parameters: NAME.qkv and NAME.output
  int64_t hidden = 0;
  int64_t heads = 0;       // of the whole model
  int64_t kv_heads = 0;    // divides heads
  int64_t head_width = 0;  // D
  bool rotary = false;
  bool bias = true;
  float stddev = 0;
  float output_stddev = 0;
};

std::unique_ptr<Mixer> MakeAttentionMixer(ParameterRegistry& registry, const AttentionSpec& spec,
                                          const TensorShard& shard, const ModelParallel& parallel);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_ATTENTION_MIXER_H_
