// The first block of a language model: token vectors, with learned positions where it has them, and
// the tables of the vocabulary that it shares with the head.
#ifndef MUSTER_PARALLEL_MODEL_EMBEDDING_H_
#define MUSTER_PARALLEL_MODEL_EMBEDDING_H_

#include <memory>

#include "parallel/model/language_model.h"
#include "parallel/model/model.h"
#include "parallel/model/parameters.h"
#include "parallel/model/tensor_parallel.h"

namespace muster::parallel {

// Whether a tied table is used on this rank alone, or by embedding and head on two ranks.
enum class TableUse { kOneStage, kEmbeddingOfTwo, kHeadOfTwo };

// Registers "embedding.token.weight" [V,C], of which this rank holds its shard of the rows.
ParameterId AddTokenTable(ParameterRegistry& registry, const LanguageModelConfig& config,
                          const TensorShard& shard, TableUse use);
// Registers the matrix of a head that is not tied, or whose token table is on another rank.
ParameterId AddHeadTable(ParameterRegistry& registry, const LanguageModelConfig& config,
                         const TensorShard& shard);

// Makes the embedding, and registers learned positions, "embedding.position.weight" [S,C]. With
// tensor parallelism every rank looks up the tokens of its shard of `table`, and the vectors are
// summed. `shared`: the head on this rank uses the table too and adds to its gradient first; the
// embedding's Backward reports the gradient as complete. `dropout`: the probability that an element
// of the output is dropped in training.
std::unique_ptr<Block> MakeEmbedding(ParameterRegistry& registry, const LanguageModelConfig& config,
                                     const TensorShard& shard, int context_size, ParameterId table,
                                     bool shared, double dropout);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_EMBEDDING_H_
