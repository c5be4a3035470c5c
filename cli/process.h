// Processes on this machine: starts them so that they outlive the command, identifies them, ends
// them.
#ifndef MUSTER_CLI_PROCESS_H_
#define MUSTER_CLI_PROCESS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::cli {

// A pid alone may be given to another process later; pid and start time together are not.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t start_time = 0;  // field 22 of /proc/PID/stat
};

// 0 when there is no such process, or it has ended and is a zombie.
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
// The first line of its stdout. kUnavailable: the process ended before it. kDeadlineExceeded: there
// was none within `timeout`.
absl::StatusOr<std::string> WaitForLine(DetachedProcess& process, absl::Duration timeout);

// Sends SIGTERM to all, waits up to `grace`, then sends SIGKILL to those that still run.
void EndProcesses(const std::vector<ProcessIdentity>& processes, absl::Duration grace);

// The rank processes of this user with a run directory below `directory`, with their children and
// supervisors.
std::vector<ProcessIdentity> ProcessesOf(const std::string& directory);

// Runs `command` to its end, with stdin and stderr of this process. Returns its whole stdout.
// kAborted: it failed. kUnavailable: it cannot be started.
absl::StatusOr<std::string> RunAndCapture(const std::vector<std::string>& command);

}  // namespace muster::cli

#endif  // MUSTER_CLI_PROCESS_H_
