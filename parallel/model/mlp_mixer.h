// The MLP: up-projection, activation, down-projection.
//   GELU:   output = gelu(x W_up^T + b)                    up: [F,C]
//   ReLU2:  output = max(x W_up^T + b, 0)^2                up: [F,C]
//   SwiGLU: output = silu(gate) * up of x W_up^T + b       up: [2F,C], the rows of gate, then of up
#ifndef MUSTER_PARALLEL_MODEL_MLP_MIXER_H_
#define MUSTER_PARALLEL_MODEL_MLP_MIXER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "parallel/model/mixer.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

enum class MlpKind { kGelu, kRelu2, kSwiglu };

struct MlpSpec {
  std::string name;  // of the parameters: NAME.up and NAME.down
  MlpKind kind = MlpKind::kGelu;
  int64_t hidden = 0;
  int64_t ffn = 0;   // F, of the whole model
  bool bias = true;  // not with kRelu2
  float stddev = 0;
  float output_stddev = 0;
};

std::unique_ptr<Mixer> MakeMlpMixer(ParameterRegistry& registry, const MlpSpec& spec,
                                    const TensorShard& shard, const Recomputed& recomputed);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_MLP_MIXER_H_
