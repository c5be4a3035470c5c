// A rank's output on disk: a run of files, each named by the offset of its first byte among all
// bytes ever written, the oldest removed when there are too many. An offset names the same byte for
// ever, and a reader can tell "removed" from "not yet written". A file of the same
// name in DIRECTORY.times tells when its bytes were read from the rank: records of two numbers,
// offset and Unix milliseconds.
#ifndef MUSTER_WORKER_DAEMON_LOG_FILES_H_
#define MUSTER_WORKER_DAEMON_LOG_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "worker/daemon/proc.h"

namespace muster::worker {

struct LogLimits {
  int64_t bytes_max = 16 * 1024 * 1024;  // of one file
  int files_max = 4;                     // kept, with the one being written
};

// Thread: one. One writer per directory.
class LogWriter {
 public:
  // Continues where the last writer stopped; makes the directory, and a file in it once there is
  // something to write. kUnavailable names the directory.
  static absl::StatusOr<LogWriter> Open(const std::string& directory, const LogLimits& limits);
  // `now`: when the bytes were read. kUnavailable (disk full): the bytes are lost, later ones may
  // be written.
  absl::Status Append(absl::string_view bytes, absl::Time now);
  int64_t offset() const { return start_ + size_; }

 private:
  LogWriter(std::string directory, const LogLimits& limits)
      : directory_(std::move(directory)), limits_(limits) {}
  absl::Status OpenFile(int64_t start, int64_t size);
  // What cannot be marked is lost alone.
  void Mark(absl::Time now);

  std::string directory_;
  LogLimits limits_;
  UniqueFd file_;  // not valid before the first Append
  UniqueFd times_;
  absl::Time marked_ = absl::InfinitePast();
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
struct LogTime {
  int64_t offset = 0;
  absl::Time time;
};
// When the bytes from `begin` to `end` were read, with the last mark before them; at most
// kLogMarksMax of them, evenly left out. None where there are none.
std::vector<LogTime> ReadLogTimes(const std::string& directory, int64_t begin, int64_t end);
// The offset of the first byte that was read at `since` or later, that of the end of the log where
// there is none; 0 where no times are known.
int64_t LogOffsetAt(const std::string& directory, absl::Time since);
// Bytes on disk; 0 when there is no log.
int64_t LogBytesKept(const std::string& directory);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_LOG_FILES_H_
