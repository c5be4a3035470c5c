#include "worker/daemon/job_files.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/status_macros.h"
#include "proto/spec/command_variables.h"
#include "worker/daemon/proc.h"

namespace muster::worker {
namespace {

constexpr size_t kSecretBytesMax = 64 << 10;

absl::Status Errno(const std::string& what, int error) {
  const std::string text = absl::StrCat(what, ": ", std::strerror(error));
  if (error == ENOENT || error == ENOTDIR) return absl::NotFoundError(text);
  return absl::PermissionDeniedError(text);
}

// Links inside the directory are followed, as Kubernetes mounts secrets; none leads out of it.
UniqueFd OpenBeneath(int directory, const std::string& path) {
  open_how how = {};
  how.flags = O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK;
  how.resolve = RESOLVE_BENEATH | RESOLVE_NO_MAGICLINKS;
  return UniqueFd(
      static_cast<int>(::syscall(SYS_openat2, directory, path.c_str(), &how, sizeof(how))));
}

absl::StatusOr<std::string> ReadSecret(const std::string& directory, const std::string& queue,
                                       const std::string& name) {
  const UniqueFd opened(::open(directory.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (!opened.valid()) return Errno(absl::StrCat("--secrets ", directory), errno);
  std::string path;
  UniqueFd file;
  // No queue's folder is reached under another's name.
  const bool plain = !queue.empty() && queue[0] != '/' && !absl::StrContains(queue, "..");
  if (plain) {
    path = absl::StrCat(queue, "/", name);
    file = OpenBeneath(opened.get(), path);
  }
  if (!plain || (!file.valid() && (errno == ENOENT || errno == ENOTDIR))) {
    path = name;
    file = OpenBeneath(opened.get(), path);
  }
  const std::string where = absl::StrCat("secret ", name, ": ", directory, "/", path);
  if (!file.valid()) {
    return errno == EXDEV ? absl::PermissionDeniedError(
                                absl::StrCat(where, " leads out of the directory of secrets"))
                          : Errno(where, errno);
  }
  struct stat info = {};
  if (::fstat(file.get(), &info) != 0 || !S_ISREG(info.st_mode)) {
    return absl::PermissionDeniedError(absl::StrCat(where, " is not a file"));
  }
  if ((info.st_mode & (S_IRWXO | S_IWGRP)) != 0) {
    return absl::PermissionDeniedError(
        absl::StrFormat("%s has mode %04o; chmod 0400 it, so that no other user may read it", where,
                        info.st_mode & 07777));
  }
  if (info.st_uid != 0 && info.st_uid != ::geteuid()) {
    return absl::PermissionDeniedError(absl::StrCat(where, " belongs to user ", info.st_uid,
                                                    ", who is neither root nor the daemon's"));
  }
  std::string value(kSecretBytesMax + 1, '\0');
  size_t length = 0;
  while (length < value.size()) {
    const ssize_t got = ::read(file.get(), value.data() + length, value.size() - length);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return Errno(where, errno);
    if (got == 0) break;
    length += static_cast<size_t>(got);
  }
  if (length > kSecretBytesMax) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, " is longer than ", kSecretBytesMax, " bytes"));
  }
  value.resize(length);
  if (!value.empty() && value.back() == '\n') value.pop_back();
  if (value.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat(where, " contains a zero byte"));
  }
  return value;
}

bool IsIn(const std::string& path, const std::string& directory) {
  return path == directory || directory == "/" || absl::StartsWith(path, directory + "/");
}

absl::StatusOr<std::string> Resolve(const std::string& path) {
  if (path.empty() || path[0] != '/') {
    return absl::InvalidArgumentError(absl::StrCat("path ", path, " is not absolute"));
  }
  std::string done = "/";
  const std::vector<std::string> parts = absl::StrSplit(path, '/', absl::SkipEmpty());
  for (size_t i = 0; i < parts.size(); ++i) {
    const std::string next = absl::StrCat(done == "/" ? "" : done, "/", parts[i]);
    struct stat info = {};
    if (::lstat(next.c_str(), &info) != 0) {
      if (errno != ENOENT) return Errno(next, errno);
      // The rest is to be made.
      for (size_t rest = i; rest < parts.size(); ++rest) {
        if (parts[rest] == "..") {
          return absl::InvalidArgumentError(
              absl::StrCat("path ", path, " goes up from ", next, ", which does not exist"));
        }
        if (parts[rest] != ".") absl::StrAppend(&done, done == "/" ? "" : "/", parts[rest]);
      }
      return done;
    }
    const std::unique_ptr<char, decltype(&::free)> real(::realpath(next.c_str(), nullptr), ::free);
    if (real == nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("path ", path, ": the link ", next, " leads nowhere"));
    }
    done = real.get();
  }
  return done;
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> ReadSecrets(const JobFilePolicy& policy,
                                                               const v1::JobSpec& spec) {
  std::map<std::string, std::string> values;
  for (const auto& [variable, value] : spec.env()) {
    const std::optional<std::string> name = spec::SecretIn(value);
    if (!name.has_value()) continue;
    if (policy.secrets_directory.empty()) {
      return absl::NotFoundError(absl::StrCat("env.", variable, ": secret ", *name,
                                              ": the daemon was given no --secrets"));
    }
    ASSIGN_OR_RETURN(values[variable], ReadSecret(policy.secrets_directory, spec.queue(), *name));
  }
  return values;
}

absl::StatusOr<std::string> AllowedPath(const JobFilePolicy& policy, const std::string& path) {
  ASSIGN_OR_RETURN(std::string resolved, Resolve(path));
  if (policy.allowed_paths.empty()) return resolved;
  for (const std::string& allowed : policy.allowed_paths) {
    const absl::StatusOr<std::string> directory = Resolve(allowed);
    if (directory.ok() && IsIn(resolved, *directory)) return resolved;
  }
  return absl::PermissionDeniedError(
      absl::StrCat(path, resolved == path ? "" : absl::StrCat(", which is ", resolved, ","),
                   " lies in none of the directories that --allow-path names"));
}

absl::Status CheckJobFiles(const JobFilePolicy& policy, const v1::JobSpec& spec) {
  RETURN_IF_ERROR(ReadSecrets(policy, spec).status());
  return CheckJobPaths(policy, spec);
}

absl::Status CheckJobPaths(const JobFilePolicy& policy, const v1::JobSpec& spec) {
  if (policy.allowed_paths.empty()) return absl::OkStatus();
  const std::string& working = spec.working_directory();
  if (!working.empty()) {
    const absl::Status allowed = AllowedPath(policy, working).status();
    if (!allowed.ok()) return Annotate(allowed, "working_directory");
  }
  if (std::string path = spec.checkpoint().path(); !path.empty()) {
    if (path[0] != '/') path = absl::StrCat(working, "/", path);
    const absl::Status allowed = AllowedPath(policy, path).status();
    if (!allowed.ok()) return Annotate(allowed, "checkpoint.path");
  }
  return absl::OkStatus();
}

}  // namespace muster::worker
