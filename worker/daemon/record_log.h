// The daemon's records on disk: DIRECTORY/journal, to which each group of changes is appended with
// one sync, however many records it has (docs/decisions/0024-records-are-one-journal.md).
//
// An entry is the length of its payload (4 bytes) and the payload's FNV-1a hash (8 bytes), both
// with the lowest byte first, and the payload, a v1::RecordChanges.
#ifndef MUSTER_WORKER_DAEMON_RECORD_LOG_H_
#define MUSTER_WORKER_DAEMON_RECORD_LOG_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "worker/daemon/core/events.h"

namespace muster::worker {

// Thread: one at a time.
class RecordLog {
 public:
  // Once the journal is longer than this and than four times what is in it, it is written anew.
  static constexpr int64_t kJournalBytes = 4 << 20;

  // Reads the journal of `directory`, which exists; makes one where there is none, of the files
  // that earlier versions kept, one for each record. An entry at the end that is not whole was
  // never durable, and is cut off. kDataLoss: an entry before the end is damaged; kUnavailable.
  // Each names the file.
  static absl::StatusOr<std::unique_ptr<RecordLog>> Open(FileSystem& files,
                                                         const std::string& directory);

  // As of the last Write that succeeded.
  const std::map<std::string, std::string>& records() const { return records_; }

  // Makes all of the changes durable, or, after a crash in between, none of them. After an error
  // only a new RecordLog tells which.
  absl::Status Write(const std::vector<DaemonRecord>& changes);

 private:
  RecordLog(FileSystem& files, std::string directory)
      : files_(files), directory_(std::move(directory)) {}
  std::string path() const { return directory_ + "/journal"; }
  absl::Status Read();
  absl::Status ReadOldFiles();
  // Writes what there is as one entry in place of all entries.
  absl::Status Rewrite();
  void Apply(const std::vector<DaemonRecord>& changes);
  int64_t RecordBytes() const;

  FileSystem& files_;
  const std::string directory_;
  std::map<std::string, std::string> records_;
  int64_t bytes_ = 0;  // of the journal
  std::unique_ptr<WritableFile> file_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RECORD_LOG_H_
