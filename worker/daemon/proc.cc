#include "worker/daemon/proc.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <optional>

#include "absl/algorithm/container.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/proc.h"

namespace muster::worker {

void UniqueFd::Reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

UniqueFd OpenProcess(pid_t pid, uint64_t start_time) {
  if (pid <= 0) return UniqueFd();
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!fd.valid()) return UniqueFd();
  // Read while the descriptor holds the process, whose number cannot be reused meanwhile.
  const std::optional<ProcessStat> stat = ReadProcessStat(pid);
  if (!stat.has_value() || stat->start_time != start_time || HasEnded(fd)) return UniqueFd();
  return fd;
}

bool HasEnded(const UniqueFd& pidfd) {
  if (!pidfd.valid()) return true;
  pollfd wait = {pidfd.get(), POLLIN, 0};
  return ::poll(&wait, 1, 0) > 0;
}

// Not the owner of /proc/PID, which is root for a process that keeps others from looking at it.
std::optional<uid_t> UserOf(pid_t pid) {
  const std::string status = ReadKernelFile(absl::StrCat("/proc/", pid, "/status"));
  for (absl::string_view line : absl::StrSplit(status, '\n')) {
    if (!absl::ConsumePrefix(&line, "Uid:")) continue;
    const std::vector<std::string> ids =
        absl::StrSplit(line, absl::ByAnyChar("\t "), absl::SkipEmpty());
    uid_t user = 0;
    if (!ids.empty() && absl::SimpleAtoi(ids[0], &user)) return user;
  }
  return std::nullopt;
}

std::vector<pid_t> FindProcesses(pid_t session, const std::string& name, const std::string& value,
                                 std::optional<uid_t> user) {
  const std::string entry = absl::StrCat(name, "=", value);
  std::vector<pid_t> found;
  for (const pid_t pid : AllProcesses()) {
    const std::optional<ProcessStat> stat = ReadProcessStat(pid);
    if (!stat.has_value() || stat->state == 'Z' || stat->state == 'X') continue;
    if (user.has_value() && UserOf(pid) != user) continue;
    if ((session > 0 && stat->session == session) ||
        absl::c_linear_search(EnvironmentOf(pid), entry)) {
      found.push_back(pid);
    }
  }
  return found;
}

int64_t OutOfMemoryKills() {
  const std::string cgroups = ReadKernelFile("/proc/self/cgroup");
  int64_t kills = 0;
  for (const absl::string_view line : absl::StrSplit(cgroups, '\n')) {
    // "0::/path" (version 2) or "4:memory:/path" (version 1).
    const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(':', 2));
    if (parts.size() != 3) continue;
    std::string path;
    if (parts[0] == "0" && parts[1].empty()) {
      path = absl::StrCat("/sys/fs/cgroup", parts[2], "/memory.events");
    } else if (parts[1] == "memory") {
      path = absl::StrCat("/sys/fs/cgroup/memory", parts[2], "/memory.oom_control");
    } else {
      continue;
    }
    const std::string text = ReadKernelFile(path);
    for (absl::string_view row : absl::StrSplit(text, '\n')) {
      int64_t count = 0;
      if (absl::ConsumePrefix(&row, "oom_kill ") && absl::SimpleAtoi(row, &count)) kills += count;
    }
  }
  return kills;
}

}  // namespace muster::worker
