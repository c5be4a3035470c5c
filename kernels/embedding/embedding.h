// Token embedding and GPT-2's learned position embedding. kernels/README.md: conventions of all
// ops.
#ifndef MUSTER_KERNELS_EMBEDDING_EMBEDDING_H_
#define MUSTER_KERNELS_EMBEDDING_EMBEDDING_H_

#include <cstdint>

#include "kernels/device/device.h"
#include "kernels/tensor.h"

namespace muster::kernels {

// out[t] = wte[tokens[t]] + wpe[t % S], S = `sequence`. tokens [T] i32, each in [0, V) or -1, which
// reads no row of wte (ShardTokens); wte [V,C]; wpe [S,C] or empty; out [T,C] act. A token outside
// of [-1, V) ends the process on the host and gives a row of NaN on CUDA.
void EmbeddingForward(Stream& stream, Tensor tokens, Tensor wte, Tensor wpe, int64_t sequence,
                      Tensor out);
// Sorts tokens for EmbeddingBackward. It needs the tokens alone, so forward can call it. groups
// [2,T] i32, written: groups[0] holds the tokens in ascending order, with all that are not in
// [0, vocab) last and as `vocab`; groups[1] holds the index of each in `tokens`, ascending among
// equal tokens. T and vocab are below 2^30.
void GroupTokens(Stream& stream, Tensor tokens, int64_t vocab, Tensor groups);
// d_wte [V,C] fp32 +=, d_wpe [S,C] fp32 +=; either may be empty. dout [T,C] act. `groups` is
// GroupTokens' result for the rows of d_wte, or empty without d_wte. Each row is summed in a fixed
// order that the tokens and T determine, without atomics.
void EmbeddingBackward(Stream& stream, Tensor groups, Tensor dout, int64_t sequence, Tensor d_wte,
                       Tensor d_wpe);
// The tokens of one rank of a vocabulary-parallel embedding: out[t] = tokens[t] - first where that
// is in [0, count), else -1. Both [T] i32.
void ShardTokens(Stream& stream, Tensor tokens, int64_t first, int64_t count, Tensor out);

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_EMBEDDING_EMBEDDING_H_
