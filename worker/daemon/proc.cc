#include "worker/daemon/proc.h"

#include <dirent.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace muster::worker {
namespace {

std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

void UniqueFd::Reset(int fd) {
  if (fd_ >= 0) ::close(fd_);
  fd_ = fd;
}

std::optional<ProcessStat> ReadProcessStat(pid_t pid) {
  const std::string text = ReadAll(absl::StrCat("/proc/", pid, "/stat"));
  // The name, in parentheses, may itself hold spaces and parentheses: the last ')' ends it.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 > text.size()) return std::nullopt;
  const std::vector<std::string> fields =
      absl::StrSplit(text.substr(name_end + 2), ' ');  // from field 3
  if (fields.size() < 20) return std::nullopt;
  ProcessStat stat;
  stat.state = fields[0].empty() ? '?' : fields[0][0];
  if (!absl::SimpleAtoi(fields[1], &stat.parent) || !absl::SimpleAtoi(fields[3], &stat.session) ||
      !absl::SimpleAtoi(fields[19], &stat.start_time)) {
    return std::nullopt;
  }
  return stat;
}

std::string BootId() {
  std::string id = ReadAll("/proc/sys/kernel/random/boot_id");
  while (!id.empty() && id.back() == '\n') id.pop_back();
  return id;
}

std::vector<pid_t> AllProcesses() {
  std::vector<pid_t> pids;
  DIR* directory = ::opendir("/proc");
  if (directory == nullptr) return pids;
  while (const dirent* entry = ::readdir(directory)) {
    pid_t pid = 0;
    if (absl::SimpleAtoi(entry->d_name, &pid) && pid > 0) pids.push_back(pid);
  }
  ::closedir(directory);
  std::sort(pids.begin(), pids.end());
  return pids;
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

std::vector<pid_t> FindProcesses(pid_t session, const std::string& name, const std::string& value) {
  const std::string entry = absl::StrCat(name, "=", value);
  const std::string needle = absl::StrCat(std::string(1, '\0'), entry, std::string(1, '\0'));
  std::vector<pid_t> found;
  for (const pid_t pid : AllProcesses()) {
    const std::optional<ProcessStat> stat = ReadProcessStat(pid);
    if (!stat.has_value() || stat->state == 'Z' || stat->state == 'X') continue;
    if (session > 0 && stat->session == session) {
      found.push_back(pid);
      continue;
    }
    const std::string environment = ReadAll(absl::StrCat("/proc/", pid, "/environ"));
    if (environment.find(needle) != std::string::npos ||
        absl::StartsWith(environment, absl::StrCat(entry, std::string(1, '\0')))) {
      found.push_back(pid);
    }
  }
  return found;
}

int64_t OutOfMemoryKills() {
  const std::string cgroups = ReadAll("/proc/self/cgroup");
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
    const std::string text = ReadAll(path);
    for (absl::string_view row : absl::StrSplit(text, '\n')) {
      int64_t count = 0;
      if (absl::ConsumePrefix(&row, "oom_kill ") && absl::SimpleAtoi(row, &count)) kills += count;
    }
  }
  return kills;
}

}  // namespace muster::worker
