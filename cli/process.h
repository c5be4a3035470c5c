// Processes of this machine: started to outlive the command, told apart from later ones with the
// same pid, ended in order.
#ifndef MUSTER_CLI_PROCESS_H_
#define MUSTER_CLI_PROCESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::cli {

// A pid alone may come to mean another process; with its start time it does not.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t start_time = 0;  // field 22 of /proc/PID/stat
};

// 0 when there is no such process, or only its zombie.
uint64_t StartTime(int64_t pid);
bool IsAlive(const ProcessIdentity& process);

struct DetachedProcess {
  ProcessIdentity identity;
  int ready_pipe = -1;  // its stdout; WaitForLine closes it
};
// Starts `command` in a session of its own, stdin from /dev/null, stderr appended to `log_path`.
// kUnavailable names the program and the reason.
absl::StatusOr<DetachedProcess> StartDetached(const std::vector<std::string>& command,
                                              const std::string& log_path);
// The first line of its stdout. kUnavailable when the process ends first, kDeadlineExceeded when
// nothing comes in time.
absl::StatusOr<std::string> WaitForLine(DetachedProcess& process, absl::Duration timeout);

// SIGTERM, up to `grace` of waiting for all of them, SIGKILL. Those already gone are skipped.
void EndProcesses(const std::vector<ProcessIdentity>& processes, absl::Duration grace);

// Processes of this user whose environment says MUSTER_RUN_DIRECTORY=`directory`/..., and those
// that supervise them (an argument below `directory`).
std::vector<ProcessIdentity> ProcessesOf(const std::string& directory);

// Runs to the end; stdin and stderr are this process's. The whole stdout, or kAborted when it
// failed.
absl::StatusOr<std::string> RunAndCapture(const std::vector<std::string>& command);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PROCESS_H_
