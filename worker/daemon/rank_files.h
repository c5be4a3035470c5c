// The files that a rank process and its daemon leave each other. A rank that runs as an account of
// its own has a directory of its own for them, in which it may do what it likes: make links to
// files that the daemon alone may read, replace directories, leave pipes, or files without end. So
// each file is opened from its directory's descriptor, through no link, and only what the rank's
// own account owns counts.
//
// STATE/attempts/<job id>.e<epoch>/rank-<n>/own is then a link, made by the daemon in its own
// directory, to STATE/users/<uid>/run/<job id>.e<epoch>/rank-<n>. Without it the files are in the
// run directory itself.
#ifndef MUSTER_WORKER_DAEMON_RANK_FILES_H_
#define MUSTER_WORKER_DAEMON_RANK_FILES_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "security/accounts.h"
#include "worker/daemon/proc.h"

namespace muster::worker {

// Where the rank's own files are: `run_directory`, or where its link leads.
std::string RankDirectory(const std::string& run_directory);

// Makes a directory of the account's, of mode 0700, and its link in `run_directory`, which exists.
// `users` is STATE/users; `name` is RunDirectoryName. kFailedPrecondition: the account cannot reach
// it, or it is another account's.
absl::Status MakeRankDirectory(const std::string& run_directory, const std::string& users,
                               const std::string& name, const security::Account& account);
// A directory of the account's, of mode 0700, at STATE/users/<uid>/cache.
absl::StatusOr<std::string> MakeCacheDirectory(const std::string& users,
                                               const security::Account& account);

// Thread: one. Names begin with a slash, as in worker/run_directory/run_directory.h.
class RankFiles {
 public:
  explicit RankFiles(const std::string& run_directory);

  // The account of a rank that has one of its own.
  std::optional<uid_t> uid() const { return uid_; }
  std::optional<gid_t> gid() const { return gid_; }

  // kNotFound, kPermissionDenied: not a file of the rank's; kResourceExhausted: it has more than
  // `bytes_max`.
  absl::StatusOr<std::string> Read(const std::string& name, int64_t bytes_max) const;
  absl::StatusOr<int64_t> Size(const std::string& name) const;
  // At most `length` bytes from `offset`.
  absl::StatusOr<std::string> ReadRange(const std::string& name, int64_t offset,
                                        int64_t length) const;
  // Names in a directory, at most `count_max`; none where there is no such directory.
  std::vector<std::string> List(const std::string& name, size_t count_max) const;
  // Replaces the file, which then is the rank's; what can be read is whole.
  absl::Status Write(const std::string& name, absl::string_view bytes) const;

 private:
  UniqueFd Open(const std::string& name, int flags) const;
  absl::StatusOr<UniqueFd> OpenFile(const std::string& name, int64_t& size) const;

  std::string path_;
  std::optional<uid_t> uid_;
  std::optional<gid_t> gid_;
  UniqueFd directory_;
};

// Removes the directory `path` and all that is in it, following no link; the owner of what is in it
// may change it meanwhile. At most 200 levels of directories are gone into.
absl::Status RemoveUntrustedTree(const std::string& path);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_RANK_FILES_H_
