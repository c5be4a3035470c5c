// Decoding: going on with texts token by token, from what the layers keep of the tokens so far
// instead of from the whole text. Attention keeps keys and values, one more with every token; a
// recurrent layer keeps its state, whose size does not depend on the text.
//
// Model::Decode takes any number of tokens, the next ones of every text, and updates the states.
// The logits are those of a forward pass over the whole texts, up to the order of fp32 sums: the
// first call is that pass, which keeps the states behind it.
#ifndef MUSTER_PARALLEL_MODEL_DECODE_H_
#define MUSTER_PARALLEL_MODEL_DECODE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/tensor.h"

namespace muster::parallel {

struct DecodeShape {
  int64_t batch = 1;    // texts, all of the same length
  int64_t context = 0;  // the most tokens of a text, where the model limits them
  kernels::DType activation = kernels::DType::kF32;
};

// What a mixer keeps of the tokens so far: views of arena memory. Nothing is read from it at
// position 0.
struct MixerState {
  virtual ~MixerState() = default;
};

// What a block keeps.
struct BlockState {
  virtual ~BlockState() = default;
};

struct DecodeState {
  std::vector<std::unique_ptr<BlockState>> blocks;
  int64_t length = 0;  // tokens so far; 0 begins new texts in the same memory
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_DECODE_H_
