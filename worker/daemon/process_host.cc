#include "worker/daemon/process_host.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/proc.h"
#include "base/status_macros.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/event_thread.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/rank_end.h"
#include "worker/daemon/rank_environment.h"
#include "worker/daemon/rank_files.h"
#include "worker/daemon/run_files.h"
#include "worker/daemon/shim.h"
#include "worker/daemon/shim_server.h"
#include "worker/daemon/sockets.h"

namespace muster::worker {
namespace {

// How often to look for something that has no descriptor to wait on: a file about to appear, a
// process about to be gone.
constexpr absl::Duration kRetry = absl::Milliseconds(5);
constexpr absl::Duration kReleaseRetryMax = absl::Milliseconds(200);
// A device's memory is back when no more than this is in use above what was before: contexts of
// other programs come and go.
constexpr int64_t kDeviceBytesSlack = 512 << 20;
// When the sockets of a rank are looked at after it was found running; from then on at the last
// interval.
constexpr absl::Duration kLooks[] = {absl::Milliseconds(100), absl::Seconds(1), absl::Seconds(5),
                                     absl::Seconds(30)};

// The last line of a text file; empty when there is none.
std::string LastLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::string last;
  while (std::getline(file, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

constexpr int kRemovedAtATime = 20;  // old attempt directories

bool RunsCommand(const v1::RankAssignment& rank) { return rank.spec().command_size() > 0; }

class Host : public ProcessHost {
 public:
  Host(ProcessHostOptions options, const Clock& clock, std::shared_ptr<Logger> log,
       std::function<void(DaemonEvent)> post)
      : options_(std::move(options)),
        clock_(clock),
        log_(std::move(log)),
        post_(std::move(post)),
        shim_server_(options_.shim_binary),
        thread_(clock, [this] { return !processes_.empty() || !shims_.empty(); }) {
    // A start that fails is tried again, and told, when a rank is to start.
    thread_.Post([this] { shim_server_.Start().IgnoreError(); });
  }

  void Carry(PrepareAttempt action) override {
    thread_.Post([this, action = std::move(action)] { Prepare(action); });
  }
  void Carry(StartRank action) override {
    thread_.Post([this, action = std::move(action)] { StartOne(action); });
  }
  void Carry(AttachRank action) override {
    thread_.Post([this, action = std::move(action)] { Attach(action.rank); });
  }
  void Carry(ReassignRank action) override {
    thread_.Post([this, action = std::move(action)] { Reassign(action); });
  }
  void Carry(SignalRank action) override {
    thread_.Post([this, action = std::move(action)] { Signal(action.rank, action.kill); });
  }
  void Carry(VerifyRelease action) override {
    thread_.Post(
        [this, action = std::move(action)] { Release(action.rank, kRetry, absl::ZeroDuration()); });
  }
  void Prune(std::set<std::string> held) override {
    thread_.Post([this, held = std::move(held)]() mutable {
      held_ = std::move(held);
      ++prunes_asked_;
      if (prune_by_.has_value()) return;
      prune_by_ = clock_.Monotonic() + options_.prune_within;
      AwaitPrune();
    });
  }
  void EndAll(absl::Duration grace, absl::Duration patience) override;

 private:
  // A rank whose shim may run.
  struct Process {
    WatchId watch;       // of the handshake, then of the rank
    UniqueFd handshake;  // the socket to the shim, until the rank runs
    UniqueFd shim;       // pidfds
    UniqueFd rank;
    pid_t rank_pid = 0;
    std::string boot_id;
    std::string device;
    v1::HeldByRank held;
  };

  // A shim that this daemon started.
  struct Shim {
    WatchId watch;
    UniqueFd pidfd;
  };

  std::string RunDirectory(const RankKey& key) const {
    return absl::StrCat(options_.attempts_directory, "/", RunDirectoryName(key));
  }

  void Prepare(const PrepareAttempt& action);
  absl::Status PrepareRank(const v1::RankAssignment& rank, v1::Cause& cause);
  void StartOne(const StartRank& action);
  absl::Status Launch(const StartRank& action);
  void Reassign(const ReassignRank& action);
  // Writes the assignment into the run directory, and into the one that the rank sees where that is
  // another one. Returns it as the rank gets it.
  absl::StatusOr<v1::RankAssignment> WriteAssignment(
      const RankKey& key, const v1::RankAssignment& given,
      const std::optional<security::Account>& account);
  void WatchShim(UniqueFd pidfd);
  void ReadHandshake(const RankKey& key);
  void Attach(const RankKey& key);
  void AwaitEnd(const RankKey& key);
  void ReportEnd(const RankKey& key, const std::string& boot_id, pid_t rank_pid);
  void Signal(const RankKey& key, bool kill);
  // Records the sockets on which the rank listens, again and again while it runs.
  void LookAtSockets(const RankKey& key, pid_t rank_pid, size_t look);
  void Release(const RankKey& key, absl::Duration retry, absl::Duration waited);
  // Kills the processes that hold a socket of the rank; true when there is none.
  // `user`: of the rank, where it is not the daemon's.
  bool SocketsClosed(const v1::HeldByRank& held, std::optional<uid_t> user);
  // A rank besides this one that runs on the device; null: there is none.
  const Process* FindOther(const RankKey& key, const std::string& device) const;
  // True when the memory of the rank's device is back, or will not come back. While ranks of other
  // jobs share the device, it is enough that the rank's processes are gone: what is in use then
  // says nothing of it. The last of those that share it is held to what was in use before the
  // first.
  bool DeviceBack(const RankKey& key, const v1::HeldByRank& held, absl::Duration waited);
  void AwaitPrune();
  void FindOld();
  void RemoveOld();
  // An attempt's directory, with what its ranks' accounts have of it.
  absl::Status Remove(const std::string& attempt);

  const ProcessHostOptions options_;
  const Clock& clock_;
  const std::shared_ptr<Logger> log_;
  const std::function<void(DaemonEvent)> post_;
  // On the thread only.
  std::map<RankKey, Process> processes_;
  std::map<int, Shim> shims_;  // by descriptor
  ShimServer shim_server_;
  std::set<std::string> held_;  // attempt directories that are never removed
  uint64_t prunes_asked_ = 0;
  std::optional<absl::Duration> prune_by_;  // while one is awaited or under way
  std::deque<std::filesystem::path> old_;   // to be removed
  EventThread thread_;                      // last: it uses everything above
};

// ---- preparing and starting ---------------------------------------------------------------------

void Host::Prepare(const PrepareAttempt& action) {
  AttemptPrepared answer{action.attempt, absl::OkStatus()};
  for (const v1::RankAssignment& rank : action.ranks) {
    answer.status = PrepareRank(rank, answer.cause);
    if (!answer.status.ok()) break;
  }
  post_(std::move(answer));
}

absl::Status Host::PrepareRank(const v1::RankAssignment& rank, v1::Cause& cause) {
  const std::string on_worker = absl::StrCat("worker ", options_.worker);
  cause = v1::CAUSE_USER_ERROR;
  const absl::StatusOr<std::optional<security::Account>> account =
      security::AccountOf(options_.user, rank.owner());
  if (!account.ok()) return Annotate(account.status(), on_worker);
  if (const auto secrets = ReadSecrets(options_.files, rank.spec()); !secrets.ok()) {
    return Annotate(secrets.status(), on_worker);
  }
  {
    // What the daemon may see beyond the account is not told.
    const security::ActAs as(*account);
    const std::string& working = rank.spec().working_directory();
    struct stat info = {};
    if (!working.empty() &&
        (::stat(working.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) ||
         (account->has_value() && ::faccessat(AT_FDCWD, working.c_str(), X_OK, AT_EACCESS) != 0))) {
      return absl::NotFoundError(absl::StrCat(
          "working_directory ", working, " is not a directory on ", on_worker,
          account->has_value() ? absl::StrCat(" that user ", (*account)->name, " can enter") : ""));
    }
    if (const absl::Status paths = CheckJobPaths(options_.files, rank.spec()); !paths.ok()) {
      return Annotate(paths, on_worker);
    }
    cause = v1::CAUSE_LAUNCH;
    if (!options_.command && !RunsCommand(rank) &&
        ::faccessat(AT_FDCWD, options_.rank_binary.c_str(), X_OK, AT_EACCESS) != 0) {
      return absl::NotFoundError(absl::StrCat(
          on_worker, " has no rank program at ", options_.rank_binary,
          account->has_value() ? absl::StrCat(" that user ", (*account)->name, " may run") : ""));
    }
  }
  cause = v1::CAUSE_STORAGE;
  RETURN_IF_ERROR(PosixFileSystem()->MakeDirectory(rank.run_directory()));
  if (!account->has_value()) return absl::OkStatus();
  cause = v1::CAUSE_LAUNCH;
  return Annotate(MakeRankDirectory(rank.run_directory(), options_.users_directory,
                                    RunDirectoryName({KeyOf(rank), rank.rank()}), **account),
                  on_worker);
}

void Host::StartOne(const StartRank& action) {
  if (ReadShimRecord(RunDirectory(action.rank)).has_value()) return Attach(action.rank);
  const absl::Status status = Launch(action);
  if (!status.ok()) {
    processes_.erase(action.rank);
    post_(RankNotStarted{action.rank, Annotate(status, "cannot start " + ToString(action.rank)),
                         v1::CAUSE_LAUNCH});
  }
}

void Host::Reassign(const ReassignRank& action) {
  absl::StatusOr<std::optional<security::Account>> account =
      security::AccountOf(options_.user, action.assignment.owner());
  absl::Status status = account.status();
  if (status.ok()) {
    status = WriteAssignment(action.rank, action.assignment, *account).status();
  }
  post_(RankReassigned{action.rank, action.assignment.membership(),
                       Annotate(status, "cannot reassign " + ToString(action.rank))});
}

absl::StatusOr<v1::RankAssignment> Host::WriteAssignment(
    const RankKey& key, const v1::RankAssignment& given,
    const std::optional<security::Account>& account) {
  const std::string run_directory = RunDirectory(key);
  v1::RankAssignment assignment = given;
  // After a crash of the machine it has no rank to be read by.
  RETURN_IF_ERROR(PosixFileSystem()->WriteUnsynced(run_directory + kAssignmentFile,
                                                   assignment.SerializeAsString()));
  if (!account.has_value()) return assignment;
  RETURN_IF_ERROR(
      MakeRankDirectory(run_directory, options_.users_directory, RunDirectoryName(key), *account));
  assignment.set_run_directory(RankDirectory(run_directory));
  ASSIGN_OR_RETURN(*assignment.mutable_cache_directory(),
                   MakeCacheDirectory(options_.users_directory, *account));
  ASSIGN_OR_RETURN(*assignment.mutable_daemon_socket(),
                   options_.serve_user(account->uid, account->gid));
  RETURN_IF_ERROR(RankFiles(run_directory).Write(kAssignmentFile, assignment.SerializeAsString()));
  return assignment;
}

absl::Status Host::Launch(const StartRank& action) {
  const std::string run_directory = RunDirectory(action.rank);
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  RETURN_IF_ERROR(files->MakeDirectory(run_directory));
  ASSIGN_OR_RETURN(const std::optional<security::Account> account,
                   security::AccountOf(options_.user, action.assignment.owner()));
  ASSIGN_OR_RETURN(const v1::RankAssignment assignment,
                   WriteAssignment(action.rank, action.assignment, account));
  const std::string assignment_path =
      (account.has_value() ? assignment.run_directory() : run_directory) + kAssignmentFile;
  ShimOptions shim;
  if (account.has_value()) {
    shim.user = {account->uid, account->gid, account->groups, assignment.run_directory()};
  }
  v1::HeldByRank held;
  if (options_.device_bytes) {
    if (const auto bytes = options_.device_bytes(action.assignment.device()); bytes.has_value()) {
      held.set_device_bytes_before(*bytes);
    }
  }
  if (const Process* other = FindOther(action.rank, action.assignment.device());
      other != nullptr && other->held.has_device_bytes_before()) {
    held.set_device_bytes_before(other->held.device_bytes_before());
  }
  if (held.has_device_bytes_before()) {
    RETURN_IF_ERROR(files->WriteUnsynced(run_directory + kHeldFile, held.SerializeAsString()));
  }
  shim.run_directory = run_directory;
  shim.working_directory = assignment.spec().working_directory();
  if (shim.working_directory.empty()) {
    shim.working_directory = assignment.run_directory();
  } else {
    // Where its links led when it was allowed.
    const security::ActAs as(account);
    ASSIGN_OR_RETURN(shim.working_directory, AllowedPath(options_.files, shim.working_directory));
  }
  shim.log = options_.log;
  if (options_.command) {
    shim.command = options_.command(assignment);
  } else if (RunsCommand(assignment)) {
    shim.command = {options_.shim_binary, kCommandVerb, assignment_path};
  } else {
    shim.command = {options_.rank_binary, "--assignment", assignment_path};
    if (!options_.rank_log_format.empty()) {
      shim.command.insert(shim.command.end(), {"--log-format", options_.rank_log_format});
    }
  }
  ASSIGN_OR_RETURN(const auto secrets, ReadSecrets(options_.files, assignment.spec()));
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::UnavailableError(absl::StrCat("socketpair: ", std::strerror(errno)));
  }
  Process& process = processes_[action.rank];
  process = Process();
  process.handshake.Reset(sockets[0]);
  process.device = action.assignment.device();
  process.held = held;
  const UniqueFd theirs(sockets[1]);
  ASSIGN_OR_RETURN(
      UniqueFd pidfd,
      shim_server_.Fork(shim, RankEnvironment(assignment, secrets, account), theirs.get()));
  if (pidfd.valid()) WatchShim(std::move(pidfd));
  process.watch =
      thread_.Watch(process.handshake.get(), [this, key = action.rank] { ReadHandshake(key); });
  return absl::OkStatus();
}

void Host::WatchShim(UniqueFd pidfd) {
  const int fd = pidfd.get();
  Shim& shim = shims_[fd];
  shim.pidfd = std::move(pidfd);
  shim.watch = thread_.Watch(fd, [this, fd] {
    thread_.Unwatch(shims_[fd].watch);
    shims_.erase(fd);
  });
}

void Host::ReadHandshake(const RankKey& key) {
  Process& process = processes_[key];
  char word = 0;
  const ssize_t got = ::read(process.handshake.get(), &word, 1);
  if (got < 0 && errno == EINTR) return;
  if (got == 1 && word == kShimLocked) {
    const char go = kShimGo;
    (void)!::write(process.handshake.get(), &go, 1);
    return;
  }
  // The rank runs, or the shim has given up: its record on disk tells which.
  thread_.Unwatch(process.watch);
  processes_.erase(key);
  if (ReadShimRecord(RunDirectory(key)).has_value()) return Attach(key);
  const std::string log = RunDirectory(key) + kShimLockFile;
  post_(RankNotStarted{key,
                       absl::UnavailableError(absl::StrCat(
                           "the supervisor of ", ToString(key), " could not start on worker ",
                           options_.worker, ": ", LastLine(log), "; log: ", log)),
                       v1::CAUSE_LAUNCH});
}

// ---- finding again ------------------------------------------------------------------------------

void Host::Attach(const RankKey& key) {
  if (processes_.count(key) > 0) return;
  const std::string run_directory = RunDirectory(key);
  const std::optional<v1::ShimRecord> record = ReadShimRecord(run_directory);
  if (!record.has_value()) {
    const UniqueFd lock(::open((run_directory + kShimLockFile).c_str(), O_RDWR | O_CLOEXEC));
    if (lock.valid() && ::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      // A shim that was told to go is about to write its record.
      thread_.After(kRetry, [this, key] { Attach(key); });
      return;
    }
    if (ReadShimRecord(run_directory).has_value()) return Attach(key);
    post_(RankNotStarted{key, absl::OkStatus()});
    return;
  }
  if (const RankFiles files(run_directory); files.uid().has_value() && options_.serve_user) {
    // Also of a rank that an earlier daemon started: it calls this one there.
    const auto served = options_.serve_user(*files.uid(), *files.gid());
    if (!served.ok()) {
      log_->Error("a rank cannot call its daemon", {{"job", key.attempt.job.value()},
                                                    {"epoch", key.attempt.epoch.value()},
                                                    {"rank", key.rank},
                                                    {"status", served.status().ToString()}});
    }
  }
  const pid_t rank_pid = static_cast<pid_t>(record->rank_pid());
  UniqueFd shim;
  if (record->boot_id() == BootId()) {
    shim = OpenProcess(static_cast<pid_t>(record->shim_pid()), record->shim_start_time());
  }
  if (!shim.valid()) return ReportEnd(key, record->boot_id(), rank_pid);
  Process& process = processes_[key];
  process.shim = std::move(shim);
  process.rank = OpenProcess(rank_pid, record->rank_start_time());
  process.rank_pid = rank_pid;
  process.boot_id = record->boot_id();
  if (!process.rank.valid()) return AwaitEnd(key);
  process.watch = thread_.Watch(process.rank.get(), [this, key] {
    thread_.Unwatch(processes_[key].watch);
    AwaitEnd(key);
  });
  process.held = ReadHeld(run_directory).value_or(v1::HeldByRank());
  if (const auto assignment = ReadAssignment(run_directory); assignment.has_value()) {
    process.device = assignment->device();
  }
  thread_.After(kLooks[0], [this, key, rank_pid] { LookAtSockets(key, rank_pid, 0); });
  post_(RankStarted{key, rank_pid, ReadCommitRequests(run_directory)});
}

void Host::LookAtSockets(const RankKey& key, pid_t rank_pid, size_t look) {
  const auto found = processes_.find(key);
  if (found == processes_.end() || found->second.rank_pid != rank_pid ||
      HasEnded(found->second.rank)) {
    return;
  }
  v1::HeldByRank& held = found->second.held;
  bool changed = false;
  for (const auto& [inode, port] : ListeningSocketsOf(rank_pid)) {
    changed |= held.mutable_listening_ports()->insert({inode, port}).second;
  }
  if (changed) {
    const absl::Status written =
        PosixFileSystem()->WriteUnsynced(RunDirectory(key) + kHeldFile, held.SerializeAsString());
    if (!written.ok()) {
      log_->Warning("cannot record what a rank holds", {{"job", key.attempt.job.value()},
                                                        {"epoch", key.attempt.epoch.value()},
                                                        {"rank", key.rank},
                                                        {"status", written.ToString()}});
    }
  }
  look = std::min(look + 1, std::size(kLooks) - 1);
  thread_.After(kLooks[look], [this, key, rank_pid, look] { LookAtSockets(key, rank_pid, look); });
}

// The rank has ended; waits until its shim has written how, or is gone too.
void Host::AwaitEnd(const RankKey& key) {
  const auto found = processes_.find(key);
  if (found == processes_.end()) return;
  // Asked before looking for the file: a shim that has ended by then writes it no more.
  const bool shim_ended = HasEnded(found->second.shim);
  if (!ReadShimExit(RunDirectory(key)).has_value() && !shim_ended) {
    thread_.After(kRetry, [this, key] { AwaitEnd(key); });
    return;
  }
  const pid_t rank_pid = found->second.rank_pid;
  const std::string boot_id = found->second.boot_id;
  processes_.erase(found);
  ReportEnd(key, boot_id, rank_pid);
}

void Host::ReportEnd(const RankKey& key, const std::string& boot_id, pid_t rank_pid) {
  const std::string run_directory = RunDirectory(key);
  RankEnd end = ExplainEnd({key, rank_pid, boot_id, run_directory, options_.worker});
  post_(RankExited{key, rank_pid, std::move(end.exit), std::move(end.progress),
                   ReadCommitRequests(run_directory)});
}

// ---- ending -------------------------------------------------------------------------------------

void Host::Signal(const RankKey& key, bool kill) {
  const auto found = processes_.find(key);
  // While the rank is not reaped, the number of its process group cannot name another one.
  if (found == processes_.end() || HasEnded(found->second.rank)) return;
  ::kill(-found->second.rank_pid, kill ? SIGKILL : SIGTERM);
}

bool Host::SocketsClosed(const v1::HeldByRank& held, std::optional<uid_t> user) {
  if (held.listening_ports().empty()) return true;
  const ListeningSockets open = AllListeningSockets();
  std::set<uint64_t> left;
  for (const auto& [inode, port] : held.listening_ports()) {
    if (open.contains(inode)) left.insert(inode);
  }
  if (left.empty()) return true;
  // Only a process that the rank has started, or was given its descriptor, can hold it.
  // Where the rank's user is another one than the daemon's, it must not have the daemon end
  // processes of others by handing descriptors around.
  bool held_by_user = false;
  for (const pid_t pid : HoldersOf(left)) {
    if (user.has_value() && UserOf(pid) != user) continue;
    held_by_user = true;
    if (pid != ::getpid()) ::kill(pid, SIGKILL);
  }
  return user.has_value() && !held_by_user;
}

const Host::Process* Host::FindOther(const RankKey& key, const std::string& device) const {
  for (const auto& [other, process] : processes_) {
    if (process.device == device && !(other == key)) return &process;
  }
  return nullptr;
}

bool Host::DeviceBack(const RankKey& key, const v1::HeldByRank& held, absl::Duration waited) {
  if (!held.has_device_bytes_before() || !options_.device_bytes) return true;
  const std::optional<v1::RankAssignment> assignment = ReadAssignment(RunDirectory(key));
  if (!assignment.has_value() || FindOther(key, assignment->device()) != nullptr) return true;
  const std::optional<int64_t> used = options_.device_bytes(assignment->device());
  if (!used.has_value() || *used <= held.device_bytes_before() + kDeviceBytesSlack) return true;
  if (waited < options_.device_patience) return false;
  post_(DeviceFailed{
      assignment->device(),
      absl::StrCat(ToString(key), " has ended, but ", (*used - held.device_bytes_before()) >> 20,
                   " MiB more than before it are still in use after ",
                   absl::FormatDuration(options_.device_patience),
                   "; `nvidia-smi` shows by whom. Free them, reset the GPU if nobody holds them, "
                   "then restart the daemon")});
  return true;
}

void Host::Release(const RankKey& key, absl::Duration retry, absl::Duration waited) {
  const std::string run_directory = RunDirectory(key);
  const std::optional<v1::ShimRecord> record = ReadShimRecord(run_directory);
  bool clean = true;
  pid_t session = 0;
  if (record.has_value() && record->boot_id() == BootId()) {
    // A session has the number of its leader, the rank. It counts while that number is free or the
    // rank's own: once it is another process's, it may be another session's.
    const pid_t rank_pid = static_cast<pid_t>(record->rank_pid());
    const std::optional<ProcessStat> leader = ReadProcessStat(rank_pid);
    if (!leader.has_value() || leader->start_time == record->rank_start_time()) session = rank_pid;
    if (OpenProcess(static_cast<pid_t>(record->shim_pid()), record->shim_start_time()).valid()) {
      clean = false;
    }
  }
  const std::optional<uid_t> user = RankFiles(run_directory).uid();
  const std::optional<v1::ShimExit> exit = ReadShimExit(run_directory);
  // Where the shim has found that nothing was left, nothing has to be looked for.
  if (!exit.has_value() || !exit->left_none()) {
    for (const pid_t pid :
         FindProcesses(session, kRunDirectoryVariable, RankDirectory(run_directory), user)) {
      clean = false;
      ::kill(pid, SIGKILL);
    }
  }
  if (clean) {
    const v1::HeldByRank held = ReadHeld(run_directory).value_or(v1::HeldByRank());
    // Another boot has other sockets under the same numbers.
    const bool this_boot = record.has_value() && record->boot_id() == BootId();
    if ((!this_boot || SocketsClosed(held, user)) && DeviceBack(key, held, waited)) {
      post_(ReleaseProven{key});
      return;
    }
  }
  thread_.After(retry, [this, key, retry, waited] {
    Release(key, std::min(retry * 2, kReleaseRetryMax), waited + retry);
  });
}

absl::Status Host::Remove(const std::string& attempt) {
  const absl::StatusOr<std::vector<std::string>> ranks = PosixFileSystem()->List(attempt);
  std::set<std::string> owned;  // of its ranks' accounts
  for (const std::string& rank : ranks.value_or(std::vector<std::string>())) {
    const std::string run_directory = absl::StrCat(attempt, "/", rank);
    const std::string own = RankDirectory(run_directory);
    if (own != run_directory) owned.insert(ParentDirectory(own));
  }
  // The links go last: a removal that was cut short goes on from them.
  for (const std::string& directory : owned) RETURN_IF_ERROR(RemoveUntrustedTree(directory));
  return PosixFileSystem()->RemoveTree(attempt);
}

void Host::AwaitPrune() {
  thread_.After(std::min(options_.prune_after, *prune_by_ - clock_.Monotonic()),
                [this, asked = prunes_asked_] {
                  const bool quiet = asked == prunes_asked_;
                  if (!quiet && clock_.Monotonic() < *prune_by_) return AwaitPrune();
                  FindOld();
                  RemoveOld();
                });
}

void Host::FindOld() {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, fs::path>> ended;
  for (fs::directory_iterator it(options_.attempts_directory, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code gone;
    const auto written = it->last_write_time(gone);
    if (!gone && held_.count(it->path().filename().string()) == 0) {
      ended.emplace_back(written, it->path());
    }
  }
  std::sort(ended.begin(), ended.end());
  for (size_t i = 0; i + kAttemptsKept < ended.size(); ++i) old_.push_back(ended[i].second);
}

// A few at a time: between them ranks are started and their ends are seen.
void Host::RemoveOld() {
  for (int i = 0; i < kRemovedAtATime && !old_.empty(); ++i) {
    const std::filesystem::path path = std::move(old_.front());
    old_.pop_front();
    if (held_.count(path.filename().string()) > 0) continue;
    const absl::Status removed = Remove(path.string());
    if (!removed.ok()) {
      log_->Warning("cannot remove an old run directory",
                    {{"path", path.string()}, {"error", removed.ToString()}});
    }
  }
  if (!old_.empty()) return thread_.Post([this] { RemoveOld(); });
  prune_by_.reset();
}

void Host::EndAll(absl::Duration grace, absl::Duration patience) {
  for (const auto& [kill, wait] : {std::pair(false, grace), std::pair(true, patience)}) {
    thread_.Post([this, kill = kill] {
      for (const auto& [key, process] : processes_) Signal(key, kill);
    });
    if (thread_.AwaitIdle(wait)) return;
  }
}

}  // namespace

std::unique_ptr<ProcessHost> ProcessHost::Start(ProcessHostOptions options, const Clock& clock,
                                                std::shared_ptr<Logger> log,
                                                std::function<void(DaemonEvent)> post) {
  return std::make_unique<Host>(std::move(options), clock, std::move(log), std::move(post));
}

}  // namespace muster::worker
