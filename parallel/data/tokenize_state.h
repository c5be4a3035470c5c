// OUTPUT.resume: what a run of Tokenize() that was killed goes on from.
#ifndef MUSTER_PARALLEL_DATA_TOKENIZE_STATE_H_
#define MUSTER_PARALLEL_DATA_TOKENIZE_STATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "base/file_system.h"
#include "parallel/data/document_reader.h"
#include "parallel/data/indexed_dataset.h"
#include "parallel/data/tokenize.h"

namespace muster::parallel {

struct TokenizeState {
  std::string request;  // what the run was asked for; another request begins anew
  TextPosition next;
  std::vector<TokenizedSplit> splits;  // the last one is open where `writer` is set
  std::optional<IndexedDatasetWriter::Progress> writer;
  int64_t bytes_read = 0;
};

absl::Status SaveState(FileSystem& files, const std::string& path, const TokenizeState& state);
// nullopt: there is none, or none that can be read.
std::optional<TokenizeState> LoadState(FileSystem& files, const std::string& path);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_TOKENIZE_STATE_H_
