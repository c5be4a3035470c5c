// The last block of a language model: final norm, the product with the token table, the loss.
#ifndef MUSTER_PARALLEL_MODEL_HEAD_H_
#define MUSTER_PARALLEL_MODEL_HEAD_H_

#include <cstdint>
#include <memory>

#include "parallel/model/model.h"
#include "parallel/model/parameters.h"

namespace muster::parallel {

// Rows of the token table as stored: a multiple of 128 for large vocabularies (whole GEMM tiles),
// of 16 for small ones.
int64_t VocabStorage(int64_t vocab);

// Registers norm.{weight,bias}; `table` [VocabStorage(vocab), hidden] is the matrix of the product,
// the token embedding's own where the two are tied.
std::unique_ptr<Block> MakeHead(ParameterRegistry& registry, int64_t hidden, int64_t vocab,
                                ParameterId table);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_MODEL_HEAD_H_
