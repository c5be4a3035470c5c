#include "worker/daemon/supervise.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>

namespace muster::worker {
namespace {

constexpr int kWrongUsage = 2;
constexpr time_t kDelayMin = 1;
constexpr time_t kDelayMax = 30;
constexpr time_t kSoon = 10;

time_t MonotonicSeconds() {
  timespec now = {};
  ::clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec;
}

// Whether the daemon is told --log-format text, by one word or two.
bool WantsText(const std::vector<std::string>& arguments) {
  bool text = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (arguments[i].rfind("--log-format=", 0) == 0) text = arguments[i] == "--log-format=text";
    if (arguments[i] == "--log-format" && i + 1 < arguments.size())
      text = arguments[i + 1] == "text";
  }
  return text;
}

// Lines like those of the daemon, whose log they are part of (docs/logs.md).
void LogError(bool text, const char* message, int status) {
  char time[32] = "";
  const time_t now = ::time(nullptr);
  tm utc = {};
  ::gmtime_r(&now, &utc);
  ::strftime(time, sizeof(time), "%Y-%m-%dT%H:%M:%S.000Z", &utc);
  if (text) {
    std::fprintf(stderr, "%s ERROR supervisor: %s status=%d\n", time, message, status);
    return;
  }
  std::fprintf(
      stderr,
      "{\"time\":\"%s\",\"level\":\"error\",\"component\":\"supervisor\",\"message\":\"%s\","
      "\"fields\":{\"status\":%d}}\n",
      time, message, status);
}

pid_t Start(const std::string& program, const std::vector<std::string>& arguments,
            const sigset_t& mask) {
  std::vector<char*> words = {const_cast<char*>(program.c_str())};
  for (const std::string& argument : arguments) {
    words.push_back(const_cast<char*>(argument.c_str()));
  }
  words.push_back(nullptr);
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::sigprocmask(SIG_SETMASK, &mask, nullptr);
  ::execv(program.c_str(), words.data());
  std::fprintf(stderr, "muster-worker: cannot run %s: %s\n", program.c_str(), std::strerror(errno));
  ::_exit(127);
}

int StatusOf(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

int Supervise(const std::string& program, const std::vector<std::string>& arguments) {
  // Orphans become its children when it is not pid 1 too.
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  sigset_t waited, before;
  sigemptyset(&waited);
  for (const int signal : {SIGCHLD, SIGTERM, SIGINT}) sigaddset(&waited, signal);
  ::sigprocmask(SIG_BLOCK, &waited, &before);

  const bool text = WantsText(arguments);
  bool stopping = false;
  time_t delay = kDelayMin;
  time_t started = MonotonicSeconds();
  time_t start_at = started;
  pid_t daemon = Start(program, arguments, before);  // -1 while it waits for its next start
  int last_status = 1;
  while (true) {
    const timespec timeout = {std::max<time_t>(0, start_at - MonotonicSeconds()), 0};
    const int signal =
        daemon > 0 ? ::sigwaitinfo(&waited, nullptr) : ::sigtimedwait(&waited, nullptr, &timeout);
    if (signal == SIGTERM || signal == SIGINT) {
      stopping = true;
      if (daemon > 0) ::kill(daemon, signal);
    }
    int status = 0;
    for (pid_t ended; (ended = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      if (ended != daemon) continue;
      daemon = -1;
      last_status = StatusOf(status);
      if (stopping || last_status == kWrongUsage) return last_status;
      const time_t now = MonotonicSeconds();
      delay = now - started < kSoon ? std::min(2 * delay, kDelayMax) : kDelayMin;
      start_at = now + delay;
      LogError(text, "the daemon ended; its ranks train on, and it is started again", last_status);
    }
    if (daemon > 0) continue;
    if (stopping) return last_status;
    if (MonotonicSeconds() < start_at) continue;
    started = MonotonicSeconds();
    daemon = Start(program, arguments, before);
  }
}

}  // namespace muster::worker
