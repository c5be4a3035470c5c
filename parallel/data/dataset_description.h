// PREFIX.dataset.json beside a dataset says with which tokenizer it was made, and PREFIX.tokenizer
// is that tokenizer's file, unchanged.
#ifndef MUSTER_PARALLEL_DATA_DATASET_DESCRIPTION_H_
#define MUSTER_PARALLEL_DATA_DATASET_DESCRIPTION_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/file_system.h"

namespace muster::parallel {

struct DatasetDescription {
  std::string tokenizer;          // "bytes", or what the file was called
  std::string tokenizer_sha256;   // of the file; empty for "bytes"
  int64_t vocabulary = 0;         // of the tokenizer
  int64_t largest_id = 0;         // that occurs
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
// Whether a model of `vocab` tokens can be trained on the dataset, and whether it was made with
// `tokenizer` (a SHA-256 or "bytes"; empty: any). kInvalidArgument begins with `field`, which names
// the dataset to its user.
absl::Status CheckUse(const DatasetDescription& description, const std::string& field,
                      const std::string& prefix, int64_t vocab, const std::string& tokenizer);
// Writes PREFIX.tokenizer; with empty `file` removes what is there.
absl::Status WriteDatasetTokenizer(FileSystem& files, const std::string& prefix,
                                   absl::string_view file);
// The bytes of PREFIX.tokenizer; empty for "bytes". kNotFound; kDataLoss: it is not the file that
// the description names.
absl::StatusOr<std::string> ReadDatasetTokenizer(FileSystem& files, const std::string& prefix,
                                                 const DatasetDescription& description);

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_DATASET_DESCRIPTION_H_
