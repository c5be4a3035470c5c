// Files for what must be durable: checkpoints and a daemon's state. The implementation in memory
// can lose what was not synced, so that tests can crash it.
#ifndef MUSTER_BASE_FILE_SYSTEM_H_
#define MUSTER_BASE_FILE_SYSTEM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>
#include "absl/strings/string_view.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

// An open file being written from its start. Not thread-safe.
class WritableFile {
 public:
  virtual ~WritableFile() = default;
  // kUnavailable (disk full, I/O error) names the path.
  virtual absl::Status Append(absl::string_view bytes) = 0;
  // After OK the bytes survive a crash.
  virtual absl::Status Sync() = 0;
  virtual absl::Status Close() = 0;
};

// Thread-safe. Status codes: kNotFound, kPermissionDenied, kUnavailable (other I/O errors); each
// names the path.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  // Truncates an existing file.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Create(const std::string& path) = 0;
  // Cuts an existing file to its first `length` bytes and writes behind them. kDataLoss when the
  // file is shorter.
  virtual absl::StatusOr<std::unique_ptr<WritableFile>> Reopen(const std::string& path,
                                                               int64_t length) {
    (void)length;
    return absl::UnimplementedError("files are not reopened here: " + path);
  }
  virtual absl::StatusOr<std::string> Read(const std::string& path) = 0;
  // Exactly `length` bytes from `offset`; kDataLoss when the file is shorter.
  virtual absl::StatusOr<std::string> ReadRange(const std::string& path, int64_t offset,
                                                int64_t length) = 0;
  virtual absl::StatusOr<int64_t> Size(const std::string& path) = 0;
  virtual bool Exists(const std::string& path) = 0;
  // Creates parents too; an existing directory is OK.
  virtual absl::Status MakeDirectory(const std::string& path) = 0;
  // Names (not paths) in a directory, sorted.
  virtual absl::StatusOr<std::vector<std::string>> List(const std::string& path) = 0;
  // Atomic; replaces `to`. Durable after SyncDirectory of the parent.
  virtual absl::Status Rename(const std::string& from, const std::string& to) = 0;
  virtual absl::Status SyncDirectory(const std::string& path) = 0;
  virtual absl::Status RemoveFile(const std::string& path) = 0;
  // Missing is OK.
  virtual absl::Status RemoveTree(const std::string& path) = 0;

  // Writes a temporary file beside `path`, syncs it, renames it to `path` and syncs the directory.
  // Even after a crash `path` has either all of `bytes` or what it had before.
  absl::Status WriteAtomically(const std::string& path, absl::string_view bytes);
  // The same without any sync: a reader sees the old bytes or all of the new ones, also after
  // this process was killed. After a crash of the machine `path` may be missing, old or empty.
  absl::Status WriteUnsynced(const std::string& path, absl::string_view bytes);
};

std::unique_ptr<FileSystem> PosixFileSystem();

// Files in memory. Crash() returns to the durable state: contents of files as of their last Sync,
// entries of directories as of the last SyncDirectory.
class MemoryFileSystem : public FileSystem {
 public:
  ~MemoryFileSystem() override = default;
  virtual void Crash() = 0;
  // Every later write fails with kUnavailable until cleared.
  virtual void FailWrites(bool fail) = 0;
  static std::unique_ptr<MemoryFileSystem> Make();
};

// The part of `path` before the last '/'; "." when there is none.
std::string ParentDirectory(const std::string& path);

}  // namespace muster

#endif  // MUSTER_BASE_FILE_SYSTEM_H_
