// What a dataset holds, for `muster data inspect`.
#ifndef MUSTER_PARALLEL_DATA_INSPECT_H_
#define MUSTER_PARALLEL_DATA_INSPECT_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/tokenizer.h"

namespace muster::parallel {

struct DatasetSummary {
  std::string prefix;
  TokenType type = TokenType::kU8;
  int64_t documents = 0;
  int64_t sequences = 0;
  int64_t tokens = 0;
  int64_t bytes = 0;  // both files
  int32_t id_min = 0;
  int32_t id_max = 0;
  int64_t ids_distinct = 0;
  // Most frequent ids with their counts, most frequent first, ties by id.
  std::vector<std::pair<int32_t, int64_t>> top;
  std::string snippet;  // the beginning, decoded; empty without a tokenizer
};
// Reads every token once. `tokenizer` may be null. `top_max` and `snippet_tokens` limit the
// summary. Status codes: those of IndexedDataset; kDataLoss for ids that are negative.
absl::StatusOr<DatasetSummary> Inspect(const std::string& prefix, const Tokenizer* tokenizer,
                                       int top_max = 10, int snippet_tokens = 200);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_INSPECT_H_
