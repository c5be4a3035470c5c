// A rank's output on disk: a run of files, each named by the offset of its first byte among all
// bytes ever written, the oldest removed when there are too many. An offset names the same byte for
// ever, and a reader can tell "removed" from "not yet written".
#ifndef MUSTER_WORKER_DAEMON_LOG_FILES_H_
#define MUSTER_WORKER_DAEMON_LOG_FILES_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/daemon/proc.h"

namespace muster::worker {

struct LogLimits {
  int64_t bytes_max = 16 * 1024 * 1024;  // of one file
  int files_max = 4;                     // kept, with the one being written
};

// Thread: one. One writer per directory.
class LogWriter {
 public:
  // Continues where the last writer stopped. kUnavailable names the directory.
  static absl::StatusOr<LogWriter> Open(const std::string& directory, const LogLimits& limits);
  // kUnavailable (disk full): the bytes are lost, later ones may be written.
  absl::Status Append(absl::string_view bytes);
  int64_t offset() const { return start_ + size_; }

 private:
  LogWriter(std::string directory, const LogLimits& limits)
      : directory_(std::move(directory)), limits_(limits) {}
  absl::Status OpenFile(int64_t start);

  std::string directory_;
  LogLimits limits_;
  UniqueFd file_;
  int64_t start_ = 0;  // of the current file
  int64_t size_ = 0;
};

struct LogChunk {
  std::string data;
  int64_t offset = 0;  // of the first byte; later than asked for when older bytes are removed
  bool end = false;    // data ends where the log ends now
};
// At most `length_max` bytes from `offset`; a negative offset counts back from the end. kNotFound
// names the directory.
absl::StatusOr<LogChunk> ReadLog(const std::string& directory, int64_t offset, int64_t length_max);
// Bytes on disk; 0 when there is no log.
int64_t LogBytesKept(const std::string& directory);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_LOG_FILES_H_
