#include "security/accounts.h"

#include <fcntl.h>
#include <grp.h>
#include <linux/capability.h>
#include <pwd.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/proc.h"
#include "base/status_macros.h"

namespace muster::security {
namespace {

constexpr size_t kMapBytesMax = 4 << 20;
constexpr size_t kNameBytesMax = 253;  // of an identity, as of an account

struct Capability {
  int number;
  const char* name;
};
// To give files away, to reach them afterwards, to end and find processes of others, to become
// another user.
constexpr Capability kNeeded[] = {
    {CAP_CHOWN, "CAP_CHOWN"},           {CAP_DAC_OVERRIDE, "CAP_DAC_OVERRIDE"},
    {CAP_FOWNER, "CAP_FOWNER"},         {CAP_KILL, "CAP_KILL"},
    {CAP_SETGID, "CAP_SETGID"},         {CAP_SETUID, "CAP_SETUID"},
    {CAP_SYS_PTRACE, "CAP_SYS_PTRACE"},
};
// With these a process does with files what their owners and modes forbid.
constexpr uint32_t kOverFiles =
    (1u << CAP_DAC_OVERRIDE) | (1u << CAP_DAC_READ_SEARCH) | (1u << CAP_FOWNER);

uint64_t EffectiveCapabilities() {
  const std::string status = ReadKernelFile("/proc/self/status");
  for (absl::string_view line : absl::StrSplit(status, '\n')) {
    uint64_t bits = 0;
    if (absl::ConsumePrefix(&line, "CapEff:") &&
        absl::SimpleHexAtoi(absl::StripAsciiWhitespace(line), &bits)) {
      return bits;
    }
  }
  return 0;
}

// no value: there is none of this name.
absl::StatusOr<std::optional<Account>> LookUp(const std::string& name) {
  passwd entry = {};
  passwd* found = nullptr;
  std::vector<char> buffer(16 << 10);
  int error = 0;
  while ((error = ::getpwnam_r(name.c_str(), &entry, buffer.data(), buffer.size(), &found)) ==
             ERANGE &&
         buffer.size() < (1u << 20)) {
    buffer.resize(buffer.size() * 2);
  }
  // What directory services answer differs; some call a missing name an error.
  if (found == nullptr && (error == 0 || error == ENOENT || error == ESRCH)) return std::nullopt;
  if (found == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot look up the account ", name, ": ", std::strerror(error)));
  }
  Account account;
  account.name = found->pw_name;
  account.uid = found->pw_uid;
  account.gid = found->pw_gid;
  account.home = found->pw_dir == nullptr ? "" : found->pw_dir;
  account.shell = found->pw_shell == nullptr ? "" : found->pw_shell;
  int count = 64;
  account.groups.resize(static_cast<size_t>(count));
  while (::getgrouplist(account.name.c_str(), account.gid, account.groups.data(), &count) < 0) {
    account.groups.resize(std::max(account.groups.size() * 2, static_cast<size_t>(count)));
    count = static_cast<int>(account.groups.size());
  }
  account.groups.resize(static_cast<size_t>(count));
  return account;
}

absl::StatusOr<std::map<std::string, std::string>> ReadAccountMap(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) != 0) {
    return absl::NotFoundError(absl::StrCat("--job-user-map ", path, ": ", std::strerror(errno)));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0 ||
      (info.st_uid != 0 && info.st_uid != ::geteuid())) {
    return absl::PermissionDeniedError(
        absl::StrFormat("--job-user-map %s: somebody else may write it (owner %d, mode %04o); it "
                        "must belong to root, with mode 0644",
                        path, info.st_uid, info.st_mode & 07777));
  }
  if (info.st_size > static_cast<off_t>(kMapBytesMax)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--job-user-map ", path, " is longer than ", kMapBytesMax, " bytes"));
  }
  absl::StatusOr<std::string> text = PosixFileSystem()->Read(path);
  if (!text.ok()) return Annotate(text.status(), "--job-user-map");
  auto map = ParseAccountMap(*text);
  if (!map.ok()) return Annotate(map.status(), absl::StrCat("--job-user-map ", path));
  return map;
}

absl::StatusOr<std::string> AccountNameOf(const JobUserPolicy& policy, const std::string& owner) {
  if (owner.empty()) {
    return absl::NotFoundError(
        "--job-user owner: the job has no owner, since the coordinator asks nobody who they are; "
        "give it identities, or name one account with --job-user (docs/security.md)");
  }
  if (policy.map_file.empty()) return owner;
  ASSIGN_OR_RETURN(const auto map, ReadAccountMap(policy.map_file));
  auto found = map.find(owner);
  if (found == map.end()) found = map.find("*");
  if (found == map.end()) {
    return absl::NotFoundError(absl::StrCat("--job-user owner: ", policy.map_file,
                                            " names no account for ", owner,
                                            ", who submitted the job"));
  }
  return found->second;
}

}  // namespace

absl::StatusOr<std::map<std::string, std::string>> ParseAccountMap(const std::string& text) {
  std::map<std::string, std::string> out;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = line.substr(0, line.find('#'));
    const std::vector<std::string> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t\r"), absl::SkipEmpty());
    if (words.empty()) continue;
    if (words.size() != 2) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": IDENTITY ACCOUNT is expected"));
    }
    for (const std::string& word : words) {
      const bool plain = std::all_of(word.begin(), word.end(), [](char c) {
        return absl::ascii_isgraph(static_cast<unsigned char>(c));
      });
      if (word.size() > kNameBytesMax || !plain) {
        return absl::InvalidArgumentError(absl::StrCat("line ", number, ": a name has at most ",
                                                       kNameBytesMax, " bytes, printable ASCII"));
      }
    }
    if (!out.emplace(words[0], words[1]).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": ", words[0], " is twice here"));
    }
  }
  return out;
}

absl::Status CheckJobUser(const JobUserPolicy& policy) {
  if (!policy.any()) {
    return policy.map_file.empty()
               ? absl::OkStatus()
               : absl::InvalidArgumentError("--job-user-map is for --job-user owner");
  }
  if (policy.lowest_uid < 1 || policy.lowest_uid > UINT32_MAX - 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("--job-uid-min: ", policy.lowest_uid, " is not between 1 and 4294967294"));
  }
  const uint64_t held = EffectiveCapabilities();
  std::vector<std::string> missing;
  for (const Capability& capability : kNeeded) {
    if ((held >> capability.number & 1) == 0) missing.emplace_back(capability.name);
  }
  if (!missing.empty()) {
    return absl::FailedPreconditionError(
        absl::StrCat("--job-user ", policy.user, ": this daemon, of user ", ::geteuid(),
                     ", may not run ranks as "
                     "another user; it lacks ",
                     absl::StrJoin(missing, ", "),
                     ". Start it as root (docs/security.md), or without --job-user"));
  }
  if (policy.user == kJobUserOwner) {
    return policy.map_file.empty() ? absl::OkStatus() : ReadAccountMap(policy.map_file).status();
  }
  if (!policy.map_file.empty()) {
    return absl::InvalidArgumentError("--job-user-map is for --job-user owner");
  }
  return AccountOf(policy, "").status();
}

absl::StatusOr<std::optional<Account>> AccountOf(const JobUserPolicy& policy,
                                                 const std::string& owner) {
  if (!policy.any()) return std::nullopt;
  const bool of_owner = policy.user == kJobUserOwner;
  std::string name = policy.user;
  if (of_owner) {
    ASSIGN_OR_RETURN(name, AccountNameOf(policy, owner));
  }
  const std::string whose = of_owner
                                ? absl::StrCat("--job-user owner: account ", name, " of ", owner)
                                : absl::StrCat("--job-user ", name);
  ASSIGN_OR_RETURN(std::optional<Account> account, LookUp(name));
  if (!account.has_value()) {
    return absl::NotFoundError(absl::StrCat(whose, ": there is no such account on this machine"));
  }
  if (account->uid == 0 || (of_owner && account->uid < policy.lowest_uid)) {
    return absl::PermissionDeniedError(absl::StrCat(
        whose, ": its uid ", account->uid, " is ",
        account->uid == 0 ? "root's" : absl::StrCat("below --job-uid-min ", policy.lowest_uid)));
  }
  return account;
}

// ---- acting as an account -----------------------------------------------------------------------

// The system calls themselves: those of the C library would change all threads.
ActAs::ActAs(const std::optional<Account>& account) {
  if (!account.has_value()) return;
  active_ = true;
  const int count = ::getgroups(0, nullptr);
  CHECK(count >= 0) << std::strerror(errno);
  groups_.resize(static_cast<size_t>(count));
  CHECK(::getgroups(count, groups_.data()) == count) << std::strerror(errno);
  CHECK(::syscall(SYS_setgroups, account->groups.size(), account->groups.data()) == 0)
      << std::strerror(errno);
  gid_ = static_cast<gid_t>(::setfsgid(account->gid));
  uid_ = static_cast<uid_t>(::setfsuid(account->uid));
  // They return what was before, whether or not they did it.
  CHECK(::setfsuid(static_cast<uid_t>(-1)) == static_cast<int>(account->uid));
  CHECK(::setfsgid(static_cast<gid_t>(-1)) == static_cast<int>(account->gid));
  // The kernel does this for root alone.
  SetFileCapabilities(false);
}

ActAs::~ActAs() {
  if (!active_) return;
  ::setfsuid(uid_);
  ::setfsgid(gid_);
  SetFileCapabilities(true);
  CHECK(::syscall(SYS_setgroups, groups_.size(), groups_.data()) == 0) << std::strerror(errno);
  CHECK(::setfsuid(static_cast<uid_t>(-1)) == static_cast<int>(uid_));
}

void ActAs::SetFileCapabilities(bool on) {
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};  // of this thread
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3] = {};
  CHECK(::syscall(SYS_capget, &header, data) == 0) << std::strerror(errno);
  if (on) {
    data[0].effective |= capabilities_ & data[0].permitted;
  } else {
    capabilities_ = data[0].permitted & kOverFiles;
    data[0].effective &= ~kOverFiles;
  }
  CHECK(::syscall(SYS_capset, &header, data) == 0) << std::strerror(errno);
}

bool BecomeAccount(uid_t uid, gid_t gid, const std::vector<gid_t>& groups) {
  if (::setgroups(groups.size(), groups.data()) != 0 || ::setresgid(gid, gid, gid) != 0 ||
      ::setresuid(uid, uid, uid) != 0) {
    return false;
  }
  // A daemon with capabilities that is not root would hand them on.
  ::prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0);
  __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
  const __user_cap_data_struct none[_LINUX_CAPABILITY_U32S_3] = {};
  if (::syscall(SYS_capset, &header, none) != 0 || ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0) {
    return false;
  }
  uid_t real = 0, effective = 0, saved = 0;
  if (::getresuid(&real, &effective, &saved) != 0 || real != uid || effective != uid ||
      saved != uid || ::setuid(0) == 0) {
    errno = EPERM;
    return false;
  }
  return true;
}

}  // namespace muster::security
