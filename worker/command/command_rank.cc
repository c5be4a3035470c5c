#include "worker/command/command_rank.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file_system.h"
#include "base/network.h"
#include "base/status_macros.h"
#include "muster/v1/rank.pb.h"
#include "worker/command/command_progress.h"
#include "worker/command/environment.h"
#include "worker/command/master_port.h"
#include "worker/command/progress_file.h"
#include "worker/rank/daemon_client.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

constexpr absl::Duration kReadProgressEvery = absl::Milliseconds(200);
// Waiting for rank 0 is bounded by the coordinator, which gives an attempt up that does not start.
constexpr absl::Duration kStartPatience = absl::Hours(24);
// How long the command may take to end when this rank's attempt is over and no daemon ends it.
constexpr absl::Duration kAbortedGrace = absl::Seconds(10);

// Set by the handler of SIGTERM and SIGINT.
volatile sig_atomic_t terminated = 0;
void OnTerminate(int) { terminated = 1; }

absl::StatusOr<v1::RankAssignment> ReadAssignment(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string bytes, PosixFileSystem()->Read(path));
  v1::RankAssignment assignment;
  if (!assignment.ParseFromString(bytes) || assignment.job_id().empty() ||
      assignment.world_size() < 1 || assignment.rank() < 0 ||
      assignment.rank() >= assignment.world_size() || assignment.spec().command_size() == 0 ||
      assignment.daemon_socket().empty()) {
    return absl::InvalidArgumentError(path + " is not the assignment of a rank with a command");
  }
  return assignment;
}

// Goes to the rank's log, among what the command prints.
void Say(const std::string& line) { std::cerr << "muster: " << line << std::endl; }

std::vector<std::string> InheritedEnvironment() {
  std::vector<std::string> entries;
  for (char** entry = environ; *entry != nullptr; ++entry) entries.emplace_back(*entry);
  return entries;
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// The newest committed checkpoint that can be found from here.
void ChooseRestore(const v1::RankAssignment& assignment, CommandStart& start) {
  for (const v1::CheckpointRecord& record : assignment.restore()) {
    if (!IsAddress(record.path()) && ::access(record.path().c_str(), F_OK) != 0) {
      Say(absl::StrCat("the checkpoint of step ", record.step(), ", ", record.path(),
                       ", is gone; looking for an older one"));
      continue;
    }
    start.restore_step = record.step();
    start.restore_path = record.path();
    return;
  }
}

struct CommandStartup {
  const char* program;
  char* const* argv;
  char* const* envp;
  pid_t rank;     // this process
  int error = 0;  // of execve, left by the child
};
constexpr size_t kStartupStackBytes = 64 << 10;

// The child until its program runs. It has the memory of its parent, which waits meanwhile, so that
// no page of it is copied to be thrown away; hence calls of the system alone.
int BecomeCommand(void* argument) {
  CommandStartup& startup = *static_cast<CommandStartup*>(argument);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != startup.rank) ::_exit(kExitNoProgram);
  for (const int number : {SIGTERM, SIGINT, SIGHUP, SIGPIPE}) ::signal(number, SIG_DFL);
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  ::syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, 0);
  ::execve(startup.program, startup.argv, startup.envp);
  startup.error = errno;
  ::_exit(kExitNoProgram);
}

class CommandRank {
 public:
  explicit CommandRank(const v1::RankAssignment& assignment)
      : assignment_(assignment),
        progress_(assignment),
        file_(assignment.run_directory() + kCommandProgressFile) {}
  int Run();

 private:
  int Fail(v1::Cause cause, const std::string& message, int code);
  // Begins to talk to the daemon.
  void Connect();
  absl::StatusOr<CommandStart> Agree();
  // The status of execve, in the child's place.
  absl::Status Launch(const std::string& program, const std::vector<std::string>& environment);
  void WaitForEnd();
  void ReadProgress(bool last);
  void WriteExit(v1::Cause cause, const std::string& message);
  std::string Program() const { return assignment_.spec().command(0); }

  const v1::RankAssignment& assignment_;
  CommandProgress progress_;
  ProgressFile file_;
  std::optional<MasterPort> port_;  // of rank 0, for as long as this process lives
  // Null until there is something to say that cannot wait for the end: threads, a connection and a
  // report would be most of what a short command costs.
  std::unique_ptr<DaemonClient> client_;
  std::atomic<bool> aborted_ = false;
  std::atomic<pid_t> child_ = 0;
  int status_ = 0;  // of waitpid
};

void CommandRank::WriteExit(v1::Cause cause, const std::string& message) {
  v1::RankExitReport report;
  report.set_cause(cause);
  report.set_message(message);
  *report.mutable_progress() = progress_.progress();
  // Not synced: after a crash of the machine a rank that no daemon has reported was lost with it.
  const absl::Status written = PosixFileSystem()->WriteUnsynced(
      assignment_.run_directory() + kRankExitFile, report.SerializeAsString());
  if (!written.ok()) Say(absl::StrCat("cannot write the exit report: ", written.ToString()));
}

int CommandRank::Fail(v1::Cause cause, const std::string& message, int code) {
  Say(message);
  WriteExit(cause, message);
  return code;
}

absl::StatusOr<CommandStart> CommandRank::Agree() {
  CommandStart start;
  if (assignment_.rank() == 0) {
    ASSIGN_OR_RETURN(const PortRange range, PortRange::Parse(assignment_.rank_ports()));
    const size_t seed = std::hash<std::string>()(assignment_.job_id()) + assignment_.epoch();
    ASSIGN_OR_RETURN(MasterPort port, MasterPort::Choose(range, seed));
    port_.emplace(std::move(port));
    start.master_port = port_->port();
    start.master_address = assignment_.address().empty() ? "127.0.0.1" : assignment_.address();
    ChooseRestore(assignment_, start);
  }
  if (assignment_.world_size() == 1) return start;
  if (assignment_.rank() == 0) {
    absl::Status put;
    do {
      put = client_->Put(kCommandStartKey, start.ToText());
    } while (absl::IsDeadlineExceeded(put));  // the coordinator is away
    RETURN_IF_ERROR(put);
    return start;
  }
  ASSIGN_OR_RETURN(const std::string text, client_->Get(kCommandStartKey, kStartPatience));
  return CommandStart::FromText(text);
}

absl::Status CommandRank::Launch(const std::string& program,
                                 const std::vector<std::string>& environment) {
  const std::vector<std::string> arguments(assignment_.spec().command().begin(),
                                           assignment_.spec().command().end());
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  // A signal that comes before the command runs is passed on below.
  struct sigaction action = {};
  action.sa_handler = OnTerminate;
  action.sa_flags = SA_RESTART;
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) ::sigaction(number, &action, nullptr);
  CommandStartup startup = {program.c_str(), argv.data(), envp.data(), ::getpid()};
  // No handler runs in the child, whose memory is this process's.
  sigset_t all, before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  std::vector<char> stack(kStartupStackBytes);
  const pid_t child = ::clone(BecomeCommand, stack.data() + stack.size(),
                              CLONE_VM | CLONE_VFORK | SIGCHLD, &startup);
  const int failed = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (child < 0) {
    return absl::UnavailableError(absl::StrCat("cannot fork: ", std::strerror(failed)));
  }
  if (startup.error != 0) {
    ::waitpid(child, nullptr, 0);
    return absl::InvalidArgumentError(
        absl::StrCat(std::strerror(startup.error),
                     startup.error == ENOEXEC
                         ? ": it is no program and has no #! line; name its interpreter first"
                     : startup.error == ENOENT ? ": the interpreter of its #! line does not exist"
                                               : ""));
  }
  child_ = child;
  if (terminated != 0) ::kill(child, SIGTERM);
  return absl::OkStatus();
}

void CommandRank::ReadProgress(bool last) {
  const CommandReports read = file_.Read(last);
  if (!read.problem.empty()) {
    Say(absl::StrCat("part of ", assignment_.run_directory(), kCommandProgressFile,
                     " is not understood and ignored; ", read.problem));
  }
  progress_.Take(read.reports, absl::Now());
  for (const std::string& problem : progress_.TakeProblems()) Say(problem);
  if (!read.reports.empty()) Connect();
  for (const v1::CheckpointRecord& record : progress_.TakeCheckpoints()) client_->Commit(record);
  if (!read.reports.empty()) client_->Report(progress_.progress());
}

void CommandRank::WaitForEnd() {
  const int pidfd = static_cast<int>(::syscall(SYS_pidfd_open, child_.load(), 0));
  std::optional<absl::Time> kill_at;
  bool passed_on = false;
  while (true) {
    pollfd wait = {pidfd, POLLIN, 0};
    ::poll(&wait, 1, static_cast<int>(absl::ToInt64Milliseconds(kReadProgressEvery)));
    pid_t ended = 0;
    do {
      ended = ::waitpid(child_, &status_, WNOHANG);
    } while (ended < 0 && errno == EINTR);
    if (ended != 0) break;
    if (client_ == nullptr) {
      Connect();
      client_->ReportNow(progress_.progress());
    }
    // Sent to the group, it does not reach a command that has made a group of its own.
    if (terminated != 0 && !passed_on && ::getpgid(child_) != ::getpgrp()) {
      passed_on = true;
      ::kill(child_, SIGTERM);
    }
    ReadProgress(/*last=*/false);
    if (!aborted_) continue;
    // A daemon that holds the attempt ends its ranks itself; one that does not knows nothing of it.
    if (!kill_at.has_value()) {
      Say("the attempt is over: ending the command");
      kill_at = absl::Now() + kAbortedGrace;
      ::kill(child_, SIGTERM);
    } else if (absl::Now() >= *kill_at) {
      ::kill(0, SIGKILL);  // the group, and so this process too
    }
  }
  ::close(pidfd);
  ReadProgress(/*last=*/true);
}

void CommandRank::Connect() {
  if (client_ != nullptr) return;
  DaemonClientOptions options = DaemonClientOptions::From(assignment_);
  options.on_aborted = [this](const absl::Status& why) {
    aborted_ = true;
    if (child_ != 0) return;  // WaitForEnd sees to it
    WriteExit(v1::CAUSE_CANCELLED, absl::StrCat("the attempt is over: ", why.message()));
    ::_exit(kExitCannotRun);
  };
  absl::StatusOr<std::unique_ptr<DaemonClient>> client = DaemonClient::Make(std::move(options));
  CHECK_OK(client.status());  // the assignment names a socket
  client_ = *std::move(client);
}

int CommandRank::Run() {
  progress_.SetPhase("starting");
  const std::string where = absl::StrCat(" on worker ", assignment_.worker());
  // Looked up first: ranks that wait for each other should not hide that there is no program.
  absl::StatusOr<std::string> program =
      FindProgram(Program(), CommandEnvironment(assignment_, {}, InheritedEnvironment()));
  if (!program.ok()) {
    return Fail(v1::CAUSE_USER_ERROR,
                absl::StrCat("cannot run the command", where, ": ", program.status().message()),
                kExitNoProgram);
  }
  progress_.SetPhase("bootstrapping");
  if (assignment_.world_size() > 1) {
    Connect();
    client_->ReportNow(progress_.progress());
  }
  const absl::StatusOr<CommandStart> start = Agree();
  if (!start.ok()) {
    return Fail(absl::IsAborted(start.status()) ? v1::CAUSE_CANCELLED : v1::CAUSE_LAUNCH,
                absl::StrCat("the ranks could not agree where rank 0 listens", where, ": ",
                             start.status().message()),
                kExitCannotRun);
  }
  const absl::Status launched =
      Launch(*program, CommandEnvironment(assignment_, *start, InheritedEnvironment()));
  if (!launched.ok()) {
    const bool user = absl::IsInvalidArgument(launched);
    return Fail(user ? v1::CAUSE_USER_ERROR : v1::CAUSE_LAUNCH,
                absl::StrCat("cannot run ", *program, where, ": ", launched.message()),
                kExitCannotRun);
  }
  progress_.SetPid(child_);
  progress_.SetPhase("running");
  if (client_ != nullptr) client_->ReportNow(progress_.progress());
  WaitForEnd();
  // The daemon finds commits that it has not taken in the run directory, and the last progress in
  // the exit report, so that nothing has to be waited for.
  const bool failed = !WIFEXITED(status_) || WEXITSTATUS(status_) != 0;
  if (failed || progress_.progress().reports()) {
    WriteExit(v1::CAUSE_UNSPECIFIED,
              failed ? ReadErrorFile(assignment_.run_directory() + kCommandErrorFile) : "");
  }
  return WIFEXITED(status_) ? WEXITSTATUS(status_) : -WTERMSIG(status_);
}

}  // namespace

int RunCommandRank(const std::string& path) {
  const absl::StatusOr<v1::RankAssignment> assignment = ReadAssignment(path);
  if (!assignment.ok()) {
    Say(std::string(assignment.status().message()));
    return kExitCannotRun;
  }
  // Without running destructors: threads of the client may wait for the daemon.
  static CommandRank* const rank = new CommandRank(*assignment);
  const int ended = rank->Run();
  std::cerr.flush();
  if (ended < 0) {
    const rlimit no_core = {0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    ::signal(-ended, SIG_DFL);
    ::kill(::getpid(), -ended);
    ::pause();
  }
  ::_exit(ended);
}

}  // namespace muster::worker
