#include "worker/daemon/state_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace muster::worker {
namespace {

constexpr size_t kSocketPathMax = 107;

// FNV-1a: the same in every process, unlike absl::Hash.
uint64_t StableHash(const std::string& text) {
  uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

absl::StatusOr<std::string> ChooseSocket(const std::string& state_directory) {
  const std::string inside = state_directory + "/rank.sock";
  if (inside.size() <= kSocketPathMax) return inside;
  const std::string directory = absl::StrCat("/tmp/muster-", ::getuid());
  struct stat info = {};
  // Otherwise another user could put a socket of theirs where ranks look for ours.
  if (::mkdir(directory.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::UnavailableError(
        absl::StrCat("cannot create ", directory, ": ", std::strerror(errno)));
  }
  if (::lstat(directory.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
      info.st_uid != ::getuid() || (info.st_mode & 077) != 0) {
    return absl::PermissionDeniedError(
        absl::StrCat(directory,
                     " must be a directory of this user with mode 0700; the socket goes there "
                     "because ",
                     state_directory, " is too long a path for it"));
  }
  return absl::StrCat(directory, "/", absl::StrFormat("%016x", StableHash(state_directory)),
                      ".sock");
}

}  // namespace

absl::StatusOr<std::unique_ptr<StateDirectory>> StateDirectory::Open(const std::string& path) {
  std::error_code error;
  const std::string absolute = std::filesystem::absolute(path, error).lexically_normal().string();
  std::unique_ptr<StateDirectory> state(new StateDirectory(absolute));
  while (state->path_.size() > 1 && state->path_.back() == '/') state->path_.pop_back();
  RETURN_IF_ERROR(state->files_->MakeDirectory(state->path_ + "/records"));
  RETURN_IF_ERROR(state->files_->MakeDirectory(state->attempts()));
  RETURN_IF_ERROR(state->files_->MakeDirectory(state->cache()));
  const std::string lock_path = state->path_ + "/lock";
  state->lock_.Reset(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  if (!state->lock_.valid()) {
    return absl::UnavailableError(
        absl::StrCat("cannot open ", lock_path, ": ", std::strerror(errno)));
  }
  if (::flock(state->lock_.get(), LOCK_EX | LOCK_NB) != 0) {
    const absl::StatusOr<std::string> holder = state->files_->Read(lock_path);
    return absl::FailedPreconditionError(
        absl::StrCat("the state directory ", state->path_, " is in use by another worker daemon",
                     holder.ok() && !holder->empty() ? " (pid " + *holder + ")" : ""));
  }
  const std::string pid = absl::StrCat(::getpid());
  if (::ftruncate(state->lock_.get(), 0) != 0 ||
      ::pwrite(state->lock_.get(), pid.data(), pid.size(), 0) < 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot write ", lock_path, ": ", std::strerror(errno)));
  }
  ASSIGN_OR_RETURN(state->socket_, ChooseSocket(state->path_));
  return state;
}

absl::Status StateDirectory::OpenToUsers() {
  const std::string longest = users() + "/4294967295/rank.sock";
  if (longest.size() > kSocketPathMax) {
    return absl::FailedPreconditionError(absl::StrCat(
        "--state-dir ", path_, " is too long a path for the sockets of --job-user; it may have ",
        kSocketPathMax - (longest.size() - path_.size()), " bytes"));
  }
  RETURN_IF_ERROR(files_->MakeDirectory(users()));
  const std::pair<std::string, mode_t> modes[] = {{path_ + "/records", 0700},
                                                  {attempts(), 0700},
                                                  {cache(), 0700},
                                                  {users(), 0711},
                                                  {path_, 0711}};
  for (const auto& [directory, mode] : modes) {
    if (::chmod(directory.c_str(), mode) != 0) {
      return absl::PermissionDeniedError(absl::StrCat(
          "cannot give ", directory, " its mode for --job-user: ", std::strerror(errno)));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, std::string>> StateDirectory::ReadRecords() {
  ASSIGN_OR_RETURN(records_, RecordLog::Open(*files_, path_ + "/records"));
  return records_->records();
}

absl::Status StateDirectory::Write(const std::vector<DaemonRecord>& records) {
  return records_->Write(records);
}

}  // namespace muster::worker
