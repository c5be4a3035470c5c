// The first block of a language model: token vectors, with learned positions where it has them, and
// the tables of the vocabulary that it shares with the head.
#ifndef MUSTER_PARALLEL_MODEL_EMBEDDING_H_
#define MUSTER_PARALLEL_MODEL_EMBEDDING_H_

#include <memory>

#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"
#include "parallel/model/transformer.h"

namespace muster::parallel {

// Whether a tied table is used on this rank alone, or by the embedding or the head of two.
enum class TableUse { kOneStage, kEmbeddingOfTwo, kHeadOfTwo };

// "embedding.token.weight" [V,C]: this rank's rows of it.
ParameterId AddTokenTable(ParameterRegistry& registry, const TransformerConfig& config,
                          const TensorPart& part, TableUse use);
// The matrix of a head that does not find the token table on its own rank, or is not tied to it.
ParameterId AddHeadTable(ParameterRegistry& registry, const TransformerConfig& config,
                         const TensorPart& part);

// Registers learned positions, "embedding.position.weight" [S,C]. With tensor parallelism every
// rank looks up the tokens of its rows of `table`, and the vectors are summed. `shared`: with the
// head of the same model, which adds to the table's gradient first; Backward reports it. `dropout`:
// the probability that an element of the output is dropped in training.
std::unique_ptr<Block> MakeEmbedding(ParameterRegistry& registry, const TransformerConfig& config,
                                     const TensorPart& part, int context_size, ParameterId table,
                                     bool shared, double dropout);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_EMBEDDING_H_
