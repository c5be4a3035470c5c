// The text that datasets are made from: which files, and their bytes without compression.
#ifndef MUSTER_PARALLEL_DATA_TEXT_INPUT_H_
#define MUSTER_PARALLEL_DATA_TEXT_INPUT_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::parallel {

struct TextInput {
  std::string path;         // "-": standard input
  int64_t bytes = -1;       // on disk; -1: not known, as of a pipe
  int64_t modified_ns = 0;  // since 1970
  bool json_lines = false;  // by the name: .jsonl or .ndjson, also with .gz, .zst or .zstd behind
};

// Files in the order of `patterns`; those of one pattern are sorted by path. A pattern is a path, a
// directory (all files in it and below; names that begin with '.' are skipped), glob(7), or "-".
// kNotFound names a pattern without a file; kInvalidArgument for "-" given twice.
absl::StatusOr<std::vector<TextInput>> ListTextInputs(const std::vector<std::string>& patterns);

// Reads one input from its start. gzip and zstd are told by the first bytes, whatever the name; a
// file may hold several streams, one behind the other. Single-threaded.
class TextStream {
 public:
  // kNotFound, kPermissionDenied, kUnavailable; they name the file.
  static absl::StatusOr<std::unique_ptr<TextStream>> Open(const std::string& path);
  virtual ~TextStream() = default;
  // Appends text to `out` until it has at least `bytes` or the input ends, which gives false.
  // kDataLoss says where a compressed stream is broken or cut off.
  virtual absl::StatusOr<bool> Fill(size_t bytes, std::string& out) = 0;
  // Leaves out the first bytes of the text. Called at most once, before Fill. kDataLoss: there are
  // fewer.
  virtual absl::Status Skip(int64_t bytes) = 0;
  // Bytes of the file that were read so far, for the display of progress.
  virtual int64_t bytes_read() const = 0;
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_DATA_TEXT_INPUT_H_
