#include "base/proc.h"

#include <dirent.h>

#include <algorithm>
#include <fstream>
#include <sstream>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace muster {
namespace {

std::string ReadAll(pid_t pid, const char* name) {
  return ReadKernelFile(absl::StrCat("/proc/", pid, "/", name));
}

std::string ReadLine(const std::string& path) {
  return std::string(absl::StripTrailingAsciiWhitespace(ReadKernelFile(path)));
}

}  // namespace

std::string ReadKernelFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string BootId() { return ReadLine("/proc/sys/kernel/random/boot_id"); }
std::string RandomId() { return ReadLine("/proc/sys/kernel/random/uuid"); }

std::optional<ProcessStat> ReadProcessStat(pid_t pid) {
  const std::string text = ReadAll(pid, "stat");
  // The program's name, in parentheses, may itself hold spaces and parentheses: the last ')' ends
  // it.
  const size_t name_end = text.rfind(')');
  if (name_end == std::string::npos || name_end + 2 > text.size()) return std::nullopt;
  // From field 3 on.
  const std::vector<std::string> fields = absl::StrSplit(text.substr(name_end + 2), ' ');
  if (fields.size() < 20) return std::nullopt;
  ProcessStat stat;
  stat.state = fields[0].empty() ? '?' : fields[0][0];
  if (!absl::SimpleAtoi(fields[1], &stat.parent) || !absl::SimpleAtoi(fields[3], &stat.session) ||
      !absl::SimpleAtoi(fields[19], &stat.start_time)) {
    return std::nullopt;
  }
  return stat;
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

std::vector<std::string> EnvironmentOf(pid_t pid) {
  return absl::StrSplit(ReadAll(pid, "environ"), '\0', absl::SkipEmpty());
}

std::vector<std::string> ArgumentsOf(pid_t pid) {
  std::string text = ReadAll(pid, "cmdline");
  if (text.empty()) return {};
  if (text.back() == '\0') text.pop_back();
  return absl::StrSplit(text, '\0');
}

}  // namespace muster
