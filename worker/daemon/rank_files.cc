#include "worker/daemon/rank_files.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file_system.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

constexpr int kDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr int kLevelsMax = 200;

absl::Status Failed(absl::string_view what, const std::string& path, int error) {
  const std::string text = absl::StrCat("cannot ", what, " ", path, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  if (error == ELOOP) {
    return absl::PermissionDeniedError(absl::StrCat(text, ": it is a symbolic link"));
  }
  if (error == EACCES || error == EPERM) return absl::PermissionDeniedError(text);
  return absl::UnavailableError(text);
}

// A directory of the daemon's that everybody may go through and nobody else may list.
absl::Status MakePassage(const std::string& path) {
  if (::mkdir(path.c_str(), 0711) != 0 && errno != EEXIST) return Failed("make", path, errno);
  // The process's umask may have taken bits away.
  return ::chmod(path.c_str(), 0711) == 0 ? absl::OkStatus() : Failed("open up", path, errno);
}

// Its parent is the daemon's, so that nobody can put something else in its place.
absl::Status MakeOwned(const std::string& path, const security::Account& account) {
  if (::mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) return Failed("make", path, errno);
  const UniqueFd made(::open(path.c_str(), kDirectory));
  struct stat info = {};
  if (!made.valid() || ::fstat(made.get(), &info) != 0) return Failed("open", path, errno);
  if (info.st_uid != account.uid && info.st_uid != ::geteuid()) {
    return absl::FailedPreconditionError(absl::StrCat(
        path, " belongs to user ", info.st_uid, ", not to ", account.name, ", user ", account.uid));
  }
  if (info.st_uid == account.uid && (info.st_mode & 07777) == 0700) return absl::OkStatus();
  if (::fchmod(made.get(), 0700) != 0 || ::fchown(made.get(), account.uid, account.gid) != 0) {
    return Failed("give away", path, errno);
  }
  return absl::OkStatus();
}

// Removes what `directory` has under `name`.
absl::Status RemoveAt(int directory, const char* name, const std::string& path, int levels) {
  if (::unlinkat(directory, name, 0) == 0 || errno == ENOENT) return absl::OkStatus();
  if (errno != EISDIR && errno != EPERM) return Failed("remove", path, errno);
  if (levels == 0) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path, " has more than ", kLevelsMax, " levels of directories"));
  }
  {
    UniqueFd inside(::openat(directory, name, kDirectory));
    if (!inside.valid()) return Failed("open", path, errno);
    DIR* entries = ::fdopendir(inside.get());
    if (entries == nullptr) return Failed("list", path, errno);
    (void)inside.Release();  // closedir closes it
    absl::Status status;
    while (const dirent* entry = ::readdir(entries)) {
      const absl::string_view inner = entry->d_name;
      if (inner == "." || inner == "..") continue;
      status = RemoveAt(::dirfd(entries), entry->d_name, path, levels - 1);
      if (!status.ok()) break;
    }
    ::closedir(entries);
    RETURN_IF_ERROR(status);
  }
  if (::unlinkat(directory, name, AT_REMOVEDIR) == 0 || errno == ENOENT) return absl::OkStatus();
  return Failed("remove", path, errno);
}

}  // namespace

std::string RankDirectory(const std::string& run_directory) {
  char target[4096];
  const ssize_t length =
      ::readlink((run_directory + kOwnDirectory).c_str(), target, sizeof(target));
  if (length <= 0 || length == static_cast<ssize_t>(sizeof(target))) return run_directory;
  return std::string(target, static_cast<size_t>(length));
}

absl::Status MakeRankDirectory(const std::string& run_directory, const std::string& users,
                               const std::string& name, const security::Account& account) {
  const std::string home = absl::StrCat(users, "/", account.uid);
  const std::string target = absl::StrCat(home, "/run/", name);
  RETURN_IF_ERROR(MakePassage(home));
  RETURN_IF_ERROR(MakePassage(home + "/run"));
  RETURN_IF_ERROR(MakePassage(ParentDirectory(target)));
  RETURN_IF_ERROR(MakeOwned(target, account));
  const std::string link = run_directory + kOwnDirectory;
  if (::symlink(target.c_str(), link.c_str()) != 0 &&
      (errno != EEXIST || RankDirectory(run_directory) != target)) {
    return absl::FailedPreconditionError(
        absl::StrCat(link, " is there already, and does not lead to ", target));
  }
  const security::ActAs as(account);
  const UniqueFd reached(::open(target.c_str(), kDirectory));
  if (!reached.valid()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "user ", account.name, " cannot reach ", target, ": ", std::strerror(errno),
        "; all directories above --state-dir must let other users through (mode o+x)"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> MakeCacheDirectory(const std::string& users,
                                               const security::Account& account) {
  const std::string home = absl::StrCat(users, "/", account.uid);
  RETURN_IF_ERROR(MakePassage(home));
  RETURN_IF_ERROR(MakeOwned(home + "/cache", account));
  return home + "/cache";
}

RankFiles::RankFiles(const std::string& run_directory) : path_(RankDirectory(run_directory)) {
  directory_.Reset(::open(path_.c_str(), kDirectory));
  struct stat info = {};
  if (path_ != run_directory && directory_.valid() && ::fstat(directory_.get(), &info) == 0) {
    uid_ = info.st_uid;
    gid_ = info.st_gid;
  }
}

UniqueFd RankFiles::Open(const std::string& name, int flags) const {
  if (!directory_.valid()) {
    errno = ENOENT;
    return UniqueFd();
  }
  UniqueFd at;
  const std::vector<std::string> parts = absl::StrSplit(name, '/', absl::SkipEmpty());
  for (size_t i = 0; i < parts.size(); ++i) {
    const int from = i == 0 ? directory_.get() : at.get();
    const int how =
        i + 1 < parts.size() ? kDirectory : flags | O_NOFOLLOW | O_CLOEXEC | O_NONBLOCK | O_NOCTTY;
    at = UniqueFd(::openat(from, parts[i].c_str(), how));
    if (!at.valid()) return at;
  }
  return at;
}

absl::StatusOr<UniqueFd> RankFiles::OpenFile(const std::string& name, int64_t& size) const {
  UniqueFd file = Open(name, O_RDONLY);
  if (!file.valid()) return Failed("open", path_ + name, errno);
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0) return Failed("read", path_ + name, errno);
  if (!S_ISREG(info.st_mode)) {
    return absl::PermissionDeniedError(absl::StrCat(path_, name, " is not a file"));
  }
  if (uid_.has_value() && info.st_uid != *uid_) {
    return absl::PermissionDeniedError(
        absl::StrCat(path_, name, " belongs to user ", info.st_uid, ", not to the rank's"));
  }
  size = static_cast<int64_t>(info.st_size);
  return file;
}

absl::StatusOr<int64_t> RankFiles::Size(const std::string& name) const {
  int64_t size = 0;
  RETURN_IF_ERROR(OpenFile(name, size).status());
  return size;
}

absl::StatusOr<std::string> RankFiles::Read(const std::string& name, int64_t bytes_max) const {
  ASSIGN_OR_RETURN(const int64_t size, Size(name));
  if (size > bytes_max) {
    return absl::ResourceExhaustedError(
        absl::StrCat(path_, name, " has ", size, " bytes, at most ", bytes_max, " are possible"));
  }
  return ReadRange(name, 0, size);
}

absl::StatusOr<std::string> RankFiles::ReadRange(const std::string& name, int64_t offset,
                                                 int64_t length) const {
  int64_t size = 0;
  ASSIGN_OR_RETURN(const UniqueFd file, OpenFile(name, size));
  std::string out(
      static_cast<size_t>(std::clamp<int64_t>(length, 0, std::max<int64_t>(0, size - offset))),
      '\0');
  size_t done = 0;
  while (done < out.size()) {
    const ssize_t got = ::pread(file.get(), out.data() + done, out.size() - done,
                                static_cast<off_t>(offset + static_cast<int64_t>(done)));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Failed("read", path_ + name, errno);
    if (got == 0) break;
    done += static_cast<size_t>(got);
  }
  out.resize(done);
  return out;
}

std::vector<std::string> RankFiles::List(const std::string& name, size_t count_max) const {
  std::vector<std::string> names;
  UniqueFd opened = Open(name, O_RDONLY | O_DIRECTORY);
  if (!opened.valid()) return names;
  DIR* entries = ::fdopendir(opened.get());
  if (entries == nullptr) return names;
  (void)opened.Release();  // closedir closes it
  while (const dirent* entry = ::readdir(entries)) {
    const absl::string_view inner = entry->d_name;
    if (inner != "." && inner != ".." && names.size() < count_max) names.emplace_back(inner);
  }
  ::closedir(entries);
  std::sort(names.begin(), names.end());
  return names;
}

absl::Status RankFiles::Write(const std::string& name, absl::string_view bytes) const {
  if (!uid_.has_value()) return PosixFileSystem()->WriteAtomically(path_ + name, bytes);
  if (!directory_.valid()) return Failed("open", path_, ENOENT);
  const std::string temporary = absl::StrCat(name.substr(1), ".", RandomId());
  const UniqueFd file(::openat(directory_.get(), temporary.c_str(),
                               O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.valid()) return Failed("make", path_ + name, errno);
  absl::string_view left = bytes;
  int error = 0;
  while (!left.empty() && error == 0) {
    const ssize_t written = ::write(file.get(), left.data(), left.size());
    if (written >= 0) {
      left.remove_prefix(static_cast<size_t>(written));
    } else if (errno != EINTR) {
      error = errno;
    }
  }
  if (error == 0 &&
      (::fchown(file.get(), *uid_, *gid_) != 0 || ::fdatasync(file.get()) != 0 ||
       ::renameat(directory_.get(), temporary.c_str(), directory_.get(), name.c_str() + 1) != 0)) {
    error = errno;
  }
  if (error == 0) return absl::OkStatus();
  ::unlinkat(directory_.get(), temporary.c_str(), 0);
  return Failed("write", path_ + name, error);
}

absl::Status RemoveUntrustedTree(const std::string& path) {
  return RemoveAt(AT_FDCWD, path.c_str(), path, kLevelsMax);
}

}  // namespace muster::worker
