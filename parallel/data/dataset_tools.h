// Looks at datasets document by document, checks them, and puts several into one.
#ifndef MUSTER_PARALLEL_DATA_DATASET_TOOLS_H_
#define MUSTER_PARALLEL_DATA_DATASET_TOOLS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "parallel/data/dataset_description.h"
#include "parallel/data/indexed_dataset.h"

namespace muster::parallel {

struct DatasetStats {
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t text_bytes = 0;  // 0: no description says it
  // Documents that are equal, token for token, to one before them, and their tokens.
  int64_t duplicates = 0;
  int64_t duplicate_tokens = 0;
  // Tokens of the shortest and longest document, and of those at 50, 90 and 99 % by length.
  int64_t shortest = 0, median = 0, length_90 = 0, length_99 = 0, longest = 0;
  // Number of documents with 2^i to 2^(i+1) - 1 tokens.
  std::vector<int64_t> by_power;
};
// Reads every token once; takes some 40 bytes of memory per document. Codes of IndexedDataset.
absl::StatusOr<DatasetStats> Stats(FileSystem& files, const std::string& prefix);

// Opens the dataset, which checks the index, and reads every token: ids are below the vocabulary
// that the description names, and the description has the counts and the tokenizer file of the
// dataset. kDataLoss says what does not fit. Returns the description; without one, ids are only
// checked to be >= 0, and the result has the counts alone.
absl::StatusOr<DatasetDescription> Validate(FileSystem& files, const std::string& prefix);

// Writes the documents of all `prefixes`, in order, to one dataset in bounded memory. All have the
// same tokenizer (or none is described): else kInvalidArgument names two that differ, as it does
// for an output that is one of the inputs.
absl::StatusOr<DatasetDescription> Merge(FileSystem& files,
                                         const std::vector<std::string>& prefixes,
                                         const std::string& output);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_DATASET_TOOLS_H_
