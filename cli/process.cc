#include "cli/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/proc.h"
#include "proto/run_files.h"

extern char** environ;

namespace muster::cli {
namespace {

constexpr size_t kLineBytesMax = 64 << 10;

// Starts `command` with `out` as its stdout. An `in` or `err` of -1 leaves it this process's own.
absl::StatusOr<pid_t> Spawn(const std::vector<std::string>& command, int in, int out, int err,
                            bool detached) {
  std::vector<char*> arguments;
  for (const std::string& argument : command) {
    arguments.push_back(const_cast<char*>(argument.c_str()));
  }
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  if (in >= 0) posix_spawn_file_actions_adddup2(&actions, in, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, out, STDOUT_FILENO);
  if (err >= 0) posix_spawn_file_actions_adddup2(&actions, err, STDERR_FILENO);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setflags(&attributes, static_cast<short>(POSIX_SPAWN_SETSIGMASK |
                                                           (detached ? POSIX_SPAWN_SETSID : 0)));
  pid_t pid = 0;
  const int error =
      posix_spawn(&pid, arguments[0], &actions, &attributes, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat(command[0], " cannot be started: ", std::strerror(error)));
  }
  return pid;
}

// A descriptor that becomes readable when the process ends; -1 when there is no such process.
int OpenPidFd(int64_t pid) { return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)); }

void WaitForEnd(const ProcessIdentity& process, absl::Time deadline) {
  const int fd = OpenPidFd(process.pid);
  if (fd < 0) return;
  while (IsAlive(process)) {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    if (left <= 0) break;
    pollfd wait = {fd, POLLIN, 0};
    ::poll(&wait, 1, static_cast<int>(left));
    // Reaps a child of this process, which would stay a zombie; it fails for other processes.
    ::waitpid(static_cast<pid_t>(process.pid), nullptr, WNOHANG);
  }
  ::close(fd);
}

void Signal(const ProcessIdentity& process, int signal) {
  const int fd = OpenPidFd(process.pid);
  if (fd < 0) return;
  // Sent through the descriptor: another process may get the pid between check and signal.
  if (IsAlive(process)) ::syscall(SYS_pidfd_send_signal, fd, signal, nullptr, 0);
  ::close(fd);
}

}  // namespace

uint64_t StartTime(int64_t pid) {
  const std::optional<ProcessStat> stat = ReadProcessStat(static_cast<pid_t>(pid));
  if (!stat.has_value() || stat->state == 'Z' || stat->state == 'X') return 0;
  return stat->start_time;
}

bool IsAlive(const ProcessIdentity& process) {
  return process.pid > 0 && process.start_time != 0 && StartTime(process.pid) == process.start_time;
}

absl::StatusOr<DetachedProcess> StartDetached(const std::vector<std::string>& command,
                                              const std::string& log_path) {
  const int log = ::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  if (log < 0) {
    return absl::UnavailableError(
        absl::StrCat(log_path, " cannot be written: ", std::strerror(errno)));
  }
  const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) {
    ::close(log);
    ::close(null);
    return absl::UnavailableError(absl::StrCat("no pipe: ", std::strerror(errno)));
  }
  const absl::StatusOr<pid_t> pid = Spawn(command, null, pipe[1], log, /*detached=*/true);
  ::close(log);
  ::close(null);
  ::close(pipe[1]);
  if (!pid.ok()) {
    ::close(pipe[0]);
    return pid.status();
  }
  DetachedProcess process;
  process.identity = {*pid, StartTime(*pid)};
  process.ready_pipe = pipe[0];
  return process;
}

absl::StatusOr<std::string> WaitForLine(DetachedProcess& process, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  std::string text;
  absl::Status status;
  while (status.ok() && text.find('\n') == std::string::npos && text.size() < kLineBytesMax) {
    const int64_t left = absl::ToInt64Milliseconds(deadline - absl::Now());
    pollfd wait = {process.ready_pipe, POLLIN, 0};
    char buffer[4096];
    if (left <= 0) {
      status = absl::DeadlineExceededError(
          absl::StrCat("not ready within ", absl::FormatDuration(timeout)));
    } else if (::poll(&wait, 1, static_cast<int>(left)) > 0) {
      const ssize_t got = ::read(process.ready_pipe, buffer, sizeof(buffer));
      if (got > 0) text.append(buffer, static_cast<size_t>(got));
      if (got == 0) status = absl::UnavailableError("ended before it was ready");
    }
  }
  ::close(process.ready_pipe);
  process.ready_pipe = -1;
  if (!status.ok()) return status;
  return text.substr(0, text.find('\n'));
}

void EndProcesses(const std::vector<ProcessIdentity>& processes, absl::Duration grace) {
  constexpr absl::Duration kKillWait = absl::Seconds(5);
  for (const ProcessIdentity& process : processes) Signal(process, SIGTERM);
  const absl::Time deadline = absl::Now() + grace;
  for (const ProcessIdentity& process : processes) WaitForEnd(process, deadline);
  for (const ProcessIdentity& process : processes) Signal(process, SIGKILL);
  for (const ProcessIdentity& process : processes) WaitForEnd(process, absl::Now() + kKillWait);
}

std::vector<ProcessIdentity> ProcessesOf(const std::string& directory) {
  const std::string inside = directory + "/";
  const std::string variable = absl::StrCat(kRunDirectoryVariable, "=", inside);
  std::vector<ProcessIdentity> found;
  for (const pid_t pid : AllProcesses()) {
    if (pid == ::getpid()) continue;
    const std::vector<std::string> environment = EnvironmentOf(pid);
    bool ours = std::any_of(environment.begin(), environment.end(), [&](const std::string& entry) {
      return absl::StartsWith(entry, variable);
    });
    const std::vector<std::string> arguments = ArgumentsOf(pid);
    if (arguments.size() > 1 && absl::EndsWith(arguments[0], "muster-worker") &&
        arguments[1] == "shim") {
      ours = ours || std::any_of(arguments.begin(), arguments.end(), [&](const std::string& text) {
               return absl::StrContains(text, inside);
             });
    }
    const uint64_t start_time = ours ? StartTime(pid) : 0;
    if (start_time != 0) found.push_back({pid, start_time});
  }
  return found;
}

absl::StatusOr<std::string> RunAndCapture(const std::vector<std::string>& command) {
  int pipe[2];
  if (::pipe2(pipe, O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat("no pipe: ", std::strerror(errno)));
  }
  const absl::StatusOr<pid_t> pid = Spawn(command, -1, pipe[1], -1, /*detached=*/false);
  ::close(pipe[1]);
  std::string out;
  char buffer[4096];
  for (ssize_t got; pid.ok();) {
    got = ::read(pipe[0], buffer, sizeof(buffer));
    if (got > 0) out.append(buffer, static_cast<size_t>(got));
    if (got == 0 || (got < 0 && errno != EINTR)) break;
  }
  ::close(pipe[0]);
  if (!pid.ok()) return pid.status();
  int status = 0;
  while (::waitpid(*pid, &status, 0) < 0 && errno == EINTR) {
  }
  if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return out;
  return absl::AbortedError(
      WIFSIGNALED(status) ? absl::StrCat(command[0], " was ended by signal ", WTERMSIG(status))
                          : absl::StrCat(command[0], " exited with status ", WEXITSTATUS(status)));
}

}  // namespace muster::cli
