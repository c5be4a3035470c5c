// A daemon's directory: STATE/lock, STATE/records/ (record_log.h), STATE/attempts/, STATE/cache/,
// STATE/rank.sock; where ranks run as accounts of their own also STATE/users/<uid>/ with rank.sock,
// cache/ and run/ (rank_files.h).
#ifndef MUSTER_WORKER_DAEMON_STATE_DIRECTORY_H_
#define MUSTER_WORKER_DAEMON_STATE_DIRECTORY_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/file_system.h"
#include "worker/daemon/core/events.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/record_log.h"

namespace muster::worker {

// Held by one daemon at a time. Thread: one; Write may be called on another one.
class StateDirectory {
 public:
  // Creates what is missing. kFailedPrecondition when another daemon holds it (the message has its
  // pid); kPermissionDenied, kUnavailable. Each names the path.
  static absl::StatusOr<std::unique_ptr<StateDirectory>> Open(const std::string& path);

  absl::StatusOr<std::map<std::string, std::string>> ReadRecords();
  // All of them become durable, or none. Requires: ReadRecords has succeeded.
  absl::Status Write(const std::vector<DaemonRecord>& records);

  const std::string& path() const { return path_; }
  std::string attempts() const { return path_ + "/attempts"; }
  // Where ranks keep what later ranks can use.
  std::string cache() const { return path_ + "/cache"; }
  // The socket of the ranks: in the directory or, when that path is too long for a unix socket
  // address (107 bytes), under /tmp/muster-<uid>/.
  const std::string& socket() const { return socket_; }
  // Lets accounts of ranks through to STATE/users, and to nothing else. kFailedPrecondition: the
  // path is too long for sockets below it.
  absl::Status OpenToUsers();
  std::string users() const { return path_ + "/users"; }

 private:
  explicit StateDirectory(std::string path) : path_(std::move(path)) {}

  std::string path_;  // absolute
  std::string socket_;
  UniqueFd lock_;
  std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  std::unique_ptr<RecordLog> records_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_STATE_DIRECTORY_H_
