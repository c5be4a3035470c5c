// What the kernel tells about the processes of this machine: reads of /proc. Thread-safe.
#ifndef MUSTER_BASE_PROC_H_
#define MUSTER_BASE_PROC_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster {

struct ProcessStat {
  char state = '?';  // as ps shows it: 'Z' and 'X' have ended
  pid_t parent = 0;
  pid_t session = 0;
  uint64_t start_time = 0;  // clock ticks since boot; with the pid it identifies the process
};
// Absent when there is no such process.
std::optional<ProcessStat> ReadProcessStat(pid_t pid);

// The pids of all processes, ascending.
std::vector<pid_t> AllProcesses();

// "NAME=value" of each variable, as the process was started with; empty when this user may not read
// it, or there is no such process.
std::vector<std::string> EnvironmentOf(pid_t pid);
// The program and its arguments; empty as above.
std::vector<std::string> ArgumentsOf(pid_t pid);

// A text that the kernel makes, such as "/proc/self/cgroup"; empty when it cannot be read.
std::string ReadKernelFile(const std::string& path);
// Changes with every start of the machine; containers of one machine share it.
std::string BootId();
// Random, another one at each call.
std::string RandomId();

}  // namespace muster

#endif  // MUSTER_BASE_PROC_H_
