// The last block of a language model: final norm, the product with the token table, the loss.
//
// The logits of all tokens are by far the largest tensor of a step, and nothing but the loss reads
// them. So the tokens go through in chunks: product, cross-entropy with the gradient in place of
// the logits, gradients of the normed input and of the table, and only then the next chunk. Hence
// the head's part of the table's gradient is added in Forward (kLossAndGradient), chunk by chunk in
// order, and peak memory holds the logits of one chunk, in scratch that Backward of the other
// blocks uses too.
#ifndef MUSTER_PARALLEL_MODEL_HEAD_H_
#define MUSTER_PARALLEL_MODEL_HEAD_H_

#include <cstdint>
#include <memory>

#include "parallel/model/model.h"
#include "parallel/model/norm.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// Tokens whose logits stand at once: shape.head_tokens, or else the largest power of two that keeps
// them under 1 GiB, or under 2 GiB up to 8192 tokens; never more than there are.
int64_t HeadChunk(const BatchShape& shape, int64_t vocab_storage);

// Registers the final norm, "norm"; `table` [VocabStorage(vocabulary), hidden] is the matrix of the
// product: the token embedding's own, whose Backward reports its gradient as complete (`shared`),
// or another that the head reports itself. With tensor parallelism it is the rows of `part.vocab`,
// and all ranks find all losses: they exchange three numbers per token (ops.h).
std::unique_ptr<Block> MakeHead(ParameterRegistry& registry, const NormSpec& norm, int64_t hidden,
                                const TensorPart& part, ParameterId table, bool shared);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_HEAD_H_
