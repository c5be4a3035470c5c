// What a command says of its progress: JSON objects in the file that MUSTER_PROGRESS_FILE names
// (docs/commands.md). Nothing in it is trusted.
#ifndef MUSTER_WORKER_COMMAND_PROGRESS_FILE_H_
#define MUSTER_WORKER_COMMAND_PROGRESS_FILE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::worker {

// One object. Fields that it does not have keep their values from objects before it.
struct CommandReport {
  struct Checkpoint {
    int64_t step = 0;  // at least 1
    std::string path;
  };
  std::optional<int64_t> step;
  std::optional<int64_t> steps;
  std::optional<int64_t> tokens;
  std::optional<double> loss;
  std::optional<double> validation_loss;
  std::optional<double> tokens_per_second;
  std::optional<std::string> phase;
  std::optional<Checkpoint> checkpoint;
};

// kInvalidArgument names the field, or says that it is no JSON object. Unknown fields are ignored.
absl::StatusOr<CommandReport> ParseReport(const std::string& json);

struct CommandReports {
  std::vector<CommandReport> reports;  // in order of the file
  std::string problem;  // of the first text that is no report, which is skipped; empty = none
};
// The content of a file is one object, or one object per line. Of a last line without an end only a
// complete object counts.
CommandReports ParseReports(const std::string& content);

// The reason for which a command failed, from the file that TORCHELASTIC_ERROR_FILE names, as
// PyTorch's @record writes it; empty when there is none that can be read.
std::string ReadErrorFile(const std::string& path);

struct FileVersion {  // identifies a content
  uint64_t device = 0;
  uint64_t inode = 0;
  int64_t size = 0;
  int64_t seconds = 0;  // of the last change
  int64_t nanoseconds = 0;
  bool operator==(const FileVersion&) const = default;
};

// Reads the file again whenever it has changed. It may be appended to, rewritten or replaced.
class ProgressFile {
 public:
  // Of a longer file the last lines count.
  static constexpr int64_t kBytesMax = 256 << 10;

  explicit ProgressFile(std::string path) : path_(std::move(path)) {}

  // The reports of the file when it has changed since the last call, else none. A problem is told
  // once, when the file has not changed since the call before, since it may be half written;
  // `last`: it will not be written any more.
  CommandReports Read(bool last = false);

 private:
  const std::string path_;
  std::optional<FileVersion> seen_;
  std::string problem_;  // found in the version seen
  bool told_ = false;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_COMMAND_PROGRESS_FILE_H_
