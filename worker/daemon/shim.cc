#include "worker/daemon/shim.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "muster/v1/daemon_state.pb.h"
#include "security/accounts.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

constexpr int kExitFailed = 1;
constexpr int kExitNoDaemon = 4;
// An argument before those of every shim, so that a daemon and a shim of different versions
// understand each other.
constexpr char kUserArgument[] = "--user=";
constexpr int kKillPollMs = 10;  // between two rounds of killing descendants

std::string ErrorText(int error) { return std::strerror(error); }

// "UID:GID:GROUP,GROUP"; false: it is not.
bool ParseUser(const std::string& text, ShimOptions::User& user) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  if (parts.size() != 3 || !absl::SimpleAtoi(parts[0], &user.uid) || user.uid == 0 ||
      !absl::SimpleAtoi(parts[1], &user.gid)) {
    return false;
  }
  for (const absl::string_view group : absl::StrSplit(parts[2], ',', absl::SkipEmpty())) {
    if (!absl::SimpleAtoi(group, &user.groups.emplace_back())) return false;
  }
  return true;
}

struct Pipe {
  UniqueFd read;
  UniqueFd write;
  bool Open() {
    int fds[2];
    if (::pipe2(fds, O_CLOEXEC) != 0) return false;
    read.Reset(fds[0]);
    write.Reset(fds[1]);
    return true;
  }
};

// Runs in the child of the fork. Waits at `gate` until shim.json is written, then becomes the
// rank's program; on failure sends errno to `error_fd`.
[[noreturn]] void BecomeRank(const ShimOptions& options, const ProgramsInside& inside, pid_t shim,
                             int gate, int output, int error_fd) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != shim) ::_exit(127);  // the shim died before the line above
  ::setsid();
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) ::signal(number, SIG_DFL);
  char go = 0;
  if (::read(gate, &go, 1) != 1) ::_exit(127);
  const int null_fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  ::dup2(null_fd, STDIN_FILENO);
  ::dup2(output, STDOUT_FILENO);
  ::dup2(output, STDERR_FILENO);
  const auto& user = options.user;
  ::setenv(kRunDirectoryVariable,
           (user.has_value() ? user->directory : options.run_directory).c_str(), 1);
  bool ready = true;
  if (user.has_value()) {
    ready = security::BecomeAccount(user->uid, user->gid, user->groups);
    // The kernel forgets this with a change of the user.
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != shim) ::_exit(127);
  }
  if (!ready) {
    // errno says why.
  } else if (options.working_directory.empty() || ::chdir(options.working_directory.c_str()) == 0) {
    if (inside != nullptr && !user.has_value()) {
      if (const std::function<int()> run = inside(options.command); run != nullptr) {
        // What an exec does: the shim sees its pipe closed, and its lock stays its own.
        ::prctl(PR_SET_NAME, "muster-rank");
        ::syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0);
        ::_exit(run());
      }
    }
    std::vector<char*> arguments;
    for (const std::string& argument : options.command) {
      arguments.push_back(const_cast<char*>(argument.c_str()));
    }
    arguments.push_back(nullptr);
    ::execv(arguments[0], arguments.data());
  }
  const int error = errno;
  (void)!::write(error_fd, &error, sizeof(error));
  ::_exit(127);
}

class Shim {
 public:
  Shim(const ShimOptions& options, const ProgramsInside& inside)
      : options_(options), inside_(inside) {}
  int Run();

 private:
  int Claim();
  bool Start();
  void WatchRank();
  void CopyOutput();
  void ReapChildren();
  void KillDescendants();

  const ShimOptions& options_;
  const ProgramsInside& inside_;
  UniqueFd lock_;
  UniqueFd signals_;
  Pipe output_;
  std::optional<LogWriter> log_;
  pid_t rank_ = 0;
  std::optional<v1::ShimExit> exit_;  // once the rank has ended
  std::string exec_error_;
  int64_t oom_kills_at_start_ = 0;
  bool childless_ = false;
};

int Fail(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  return kExitFailed;
}

int Shim::Claim() {
  const std::string path = options_.run_directory + kShimLockFile;
  lock_.Reset(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
  if (!lock_.valid()) return Fail(absl::StrCat("cannot open ", path, ": ", ErrorText(errno)));
  if (::flock(lock_.get(), LOCK_EX | LOCK_NB) != 0) return kShimExitAlreadyRun;
  if (::access((options_.run_directory + kShimFile).c_str(), F_OK) == 0) return kShimExitAlreadyRun;
  char word = kShimLocked;
  if (::write(kShimSocket, &word, 1) != 1) return kExitNoDaemon;
  if (::read(kShimSocket, &word, 1) != 1 || word != kShimGo) return kExitNoDaemon;
  return 0;
}

bool Shim::Start() {
  Pipe gate;
  Pipe exec_result;
  if (!output_.Open() || !gate.Open() || !exec_result.Open()) {
    Fail(absl::StrCat("cannot make a pipe: ", ErrorText(errno)));
    return false;
  }
  // So that the rank may open /dev/stdout.
  if (options_.user.has_value() &&
      ::fchown(output_.write.get(), options_.user->uid, options_.user->gid) != 0) {
    Fail(absl::StrCat("cannot give the rank its output: ", ErrorText(errno)));
    return false;
  }
  const pid_t self = ::getpid();
  rank_ = ::fork();
  if (rank_ < 0) {
    Fail(absl::StrCat("cannot fork: ", ErrorText(errno)));
    return false;
  }
  if (rank_ == 0) {
    // The child must not hold the write end, or it would wait at its own gate for ever.
    gate.write.Reset();
    BecomeRank(options_, inside_, self, gate.read.get(), output_.write.get(),
               exec_result.write.get());
  }
  output_.write.Reset();
  exec_result.write.Reset();
  v1::ShimRecord record;
  record.set_shim_pid(self);
  record.set_rank_pid(rank_);
  record.set_boot_id(BootId());
  const std::optional<ProcessStat> shim_stat = ReadProcessStat(self);
  const std::optional<ProcessStat> rank_stat = ReadProcessStat(rank_);
  if (!shim_stat.has_value() || !rank_stat.has_value()) {
    Fail("cannot read /proc: is it mounted?");
    return false;
  }
  record.set_shim_start_time(shim_stat->start_time);
  record.set_rank_start_time(rank_stat->start_time);
  const absl::Status written = WriteShimRecord(options_.run_directory, record);
  if (!written.ok()) {
    Fail(std::string(written.message()));
    return false;
  }
  const char go = kShimGo;
  (void)!::write(gate.write.get(), &go, 1);
  int error = 0;
  // The exec closes the other end; an errno says why it failed.
  if (::read(exec_result.read.get(), &error, sizeof(error)) == sizeof(error)) {
    exec_error_ = absl::StrCat("cannot run ", options_.command[0], " in ",
                               options_.working_directory, ": ", ErrorText(error));
  }
  const char running = kShimRunning;
  (void)!::write(kShimSocket, &running, 1);
  ::close(kShimSocket);
  return true;
}

// Copies what the pipe holds now. It does not wait for its end: a descendant may hold it open.
void Shim::CopyOutput() {
  char buffer[64 * 1024];
  while (output_.read.valid()) {
    const ssize_t got = ::read(output_.read.get(), buffer, sizeof(buffer));
    if (got > 0) {
      // A full disk must not stop the rank: what cannot be written is dropped.
      (void)log_->Append(absl::string_view(buffer, static_cast<size_t>(got)), absl::Now()).ok();
    } else if (got == 0) {
      output_.read.Reset();
    } else if (errno != EINTR) {
      return;
    }
  }
}

void Shim::ReapChildren() {
  while (true) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, WNOHANG);
    if (pid < 0 && errno == EINTR) continue;
    if (pid < 0) childless_ = true;
    if (pid <= 0) return;
    if (pid != rank_) continue;
    exit_.emplace();
    exit_->set_code(WIFEXITED(status) ? WEXITSTATUS(status) : -1);
    exit_->set_signal(WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    exit_->set_error(exec_error_);
    // A shell whose command was killed exits with 128 and the number of the signal.
    const bool killed = exit_->signal() == SIGKILL || exit_->code() == 128 + SIGKILL;
    exit_->set_out_of_memory(killed && OutOfMemoryKills() > oom_kills_at_start_);
  }
}

void Shim::KillDescendants() {
  const pid_t self = ::getpid();
  for (const pid_t pid : AllProcesses()) {
    const std::optional<ProcessStat> stat = ReadProcessStat(pid);
    if (stat.has_value() && (stat->parent == self || stat->session == rank_)) {
      ::kill(pid, SIGKILL);
    }
  }
}

void Shim::WatchRank() {
  bool reported = false;
  while (!childless_) {
    pollfd wait[2] = {{signals_.get(), POLLIN, 0}, {output_.read.get(), POLLIN, 0}};
    ::poll(wait, output_.read.valid() ? 2 : 1, exit_.has_value() ? kKillPollMs : -1);
    signalfd_siginfo info;
    while (::read(signals_.get(), &info, sizeof(info)) > 0) {
    }
    ReapChildren();
    CopyOutput();
    if (!exit_.has_value()) continue;
    if (!reported) {
      exit_->set_left_none(childless_);
      const absl::Status written = WriteShimExit(options_.run_directory, *exit_);
      if (!written.ok()) Fail(std::string(written.message()));
      reported = true;
    }
    if (!childless_) KillDescendants();
  }
  CopyOutput();
}

int Shim::Run() {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  ::prctl(PR_SET_NAME, "muster-shim");
  // Signals to end are sent to the rank; the shim ignores them, so that it can report the end.
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) ::signal(number, SIG_IGN);
  sigset_t children;
  sigemptyset(&children);
  sigaddset(&children, SIGCHLD);
  ::sigprocmask(SIG_BLOCK, &children, nullptr);
  signals_.Reset(::signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC));
  ::fcntl(kShimSocket, F_SETFD, FD_CLOEXEC);
  if (!signals_.valid()) return Fail(absl::StrCat("signalfd: ", ErrorText(errno)));
  oom_kills_at_start_ = OutOfMemoryKills();
  absl::StatusOr<LogWriter> log =
      LogWriter::Open(options_.run_directory + kLogDirectory, options_.log);
  if (!log.ok()) return Fail(std::string(log.status().message()));
  log_.emplace(std::move(*log));
  if (const int claimed = Claim(); claimed != 0) return claimed;
  if (!Start()) return kExitFailed;  // a child that waits at the gate ends with us
  ::fcntl(output_.read.get(), F_SETFL, O_NONBLOCK);
  WatchRank();
  return 0;
}

}  // namespace

std::vector<std::string> ShimArguments(const ShimOptions& options) {
  std::vector<std::string> arguments = {kShimVerb};
  if (options.user.has_value()) {
    arguments.push_back(absl::StrCat(kUserArgument, options.user->uid, ":", options.user->gid, ":",
                                     absl::StrJoin(options.user->groups, ",")));
    arguments.push_back(options.user->directory);
  }
  for (const std::string& argument :
       {options.run_directory, options.working_directory, absl::StrCat(options.log.bytes_max),
        absl::StrCat(options.log.files_max)}) {
    arguments.push_back(argument);
  }
  arguments.insert(arguments.end(), options.command.begin(), options.command.end());
  return arguments;
}

ShimOptions ParseShimArguments(const std::vector<std::string>& given) {
  ShimOptions options;
  std::vector<std::string> arguments = given;
  if (arguments.size() > 2 && absl::StartsWith(arguments[1], kUserArgument)) {
    options.user = ShimOptions::User();
    if (!ParseUser(arguments[1].substr(sizeof(kUserArgument) - 1), *options.user)) {
      return ShimOptions();
    }
    options.user->directory = arguments[2];
    arguments.erase(arguments.begin() + 1, arguments.begin() + 3);
  }
  if (arguments.size() < 6 || !absl::SimpleAtoi(arguments[3], &options.log.bytes_max) ||
      !absl::SimpleAtoi(arguments[4], &options.log.files_max)) {
    return options;
  }
  options.run_directory = arguments[1];
  options.working_directory = arguments[2];
  options.command.assign(arguments.begin() + 5, arguments.end());
  return options;
}

int RunShim(const ShimOptions& options, const ProgramsInside& inside) {
  if (options.command.empty()) return Fail("muster-worker shim is for the daemon's own use");
  return Shim(options, inside).Run();
}

}  // namespace muster::worker
