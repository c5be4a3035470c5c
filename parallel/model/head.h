// The last block of a language model: final norm, GEMM with the token table, loss.
//
// The logits of all tokens would be by far the largest tensor of a step, and only the loss reads
// them. So the head handles one slice of the tokens at a time: GEMM, cross-entropy with the
// gradient in place of the logits, gradients of the normed input and of the table. The head
// therefore adds its gradient of the table in Forward (kLossAndGradient), slice by slice in order,
// and memory holds the logits of one slice, in scratch that Backward of the other blocks uses too.
#ifndef MUSTER_PARALLEL_MODEL_HEAD_H_
#define MUSTER_PARALLEL_MODEL_HEAD_H_

#include <cstdint>
#include <memory>

#include "parallel/model/model.h"
#include "parallel/model/norm.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// Tokens of a slice: shape.head_tokens, or else the largest power of two whose logits take at most
// 1 GiB, or 2 GiB up to 8192 tokens; never more than there are.
int64_t HeadChunk(const BatchShape& shape, int64_t vocab_storage);

// Makes the head, and registers the final norm, "norm". `table` [VocabStorage(vocabulary), hidden]
// is the matrix of the GEMM: the token embedding's own, whose Backward reports its gradient as
// complete
// (`shared`), or another, which the head reports. With tensor parallelism it has the rows of
// `shard.vocab()`, and all ranks compute all losses by exchanging three numbers per token
// (kernels/loss/cross_entropy.h).
std::unique_ptr<Block> MakeHead(ParameterRegistry& registry, const NormSpec& norm, int64_t hidden,
                                const TensorShard& shard, ParameterId table, bool shared);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_HEAD_H_
