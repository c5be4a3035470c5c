// PREFIX.dataset.json beside a dataset: with which tokenizer it was made.
#ifndef MUSTER_PARALLEL_DATA_DATASET_DESCRIPTION_H_
#define MUSTER_PARALLEL_DATA_DATASET_DESCRIPTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"

namespace muster::parallel {

struct DatasetDescription {
  std::string tokenizer;          // "bytes", or what the file was called
  std::string tokenizer_sha256;   // of the file; empty for "bytes"
  int64_t vocabulary = 0;         // ids are below
  std::vector<int32_t> bos, eos;  // around every document
  int64_t documents = 0;
  int64_t tokens = 0;
  int64_t text_bytes = 0;
};

absl::Status WriteDescription(FileSystem& files, const std::string& prefix,
                              const DatasetDescription& description);
// nullopt: there is none, as beside datasets of other tools. kDataLoss: it is damaged.
absl::StatusOr<std::optional<DatasetDescription>> ReadDescription(FileSystem& files,
                                                                  const std::string& prefix);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_DATASET_DESCRIPTION_H_
