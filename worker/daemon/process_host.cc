#include "worker/daemon/process_host.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
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
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "worker/daemon/limits.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/run_files.h"
#include "worker/daemon/shim.h"

namespace muster::worker {
namespace {

// Between looks at something that has no descriptor to wait on (a file about to appear, a process
// about to be gone).
constexpr absl::Duration kRetry = absl::Milliseconds(5);
constexpr absl::Duration kReleaseRetryMax = absl::Milliseconds(200);

std::string Excerpt(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::string last;
  while (std::getline(file, line)) {
    if (!line.empty()) last = line;
  }
  return last;
}

std::string SignalName(int number) {
  const char* name = ::sigabbrev_np(number);
  return name == nullptr ? absl::StrCat(number) : absl::StrCat(number, " (SIG", name, ")");
}

// Libraries size their thread pools from these; without them each rank would take every core.
std::vector<std::string> RankEnvironment(const v1::RankAssignment& assignment) {
  const std::string threads = absl::StrCat(assignment.threads());
  const std::map<std::string, std::string> ours = {
      {"OMP_NUM_THREADS", threads},
      {"OPENBLAS_NUM_THREADS", threads},
      {"MKL_NUM_THREADS", threads},
      // The order in which the daemon names them.
      {"CUDA_DEVICE_ORDER", "PCI_BUS_ID"},
      {"MUSTER_JOB_ID", assignment.job_id()},
      {"MUSTER_EPOCH", absl::StrCat(assignment.epoch())},
      {"MUSTER_RANK", absl::StrCat(assignment.rank())},
  };
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    if (ours.count(text.substr(0, text.find('='))) == 0) environment.push_back(text);
  }
  for (const auto& [name, value] : ours) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

std::vector<char*> Pointers(const std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  for (const std::string& text : strings) pointers.push_back(const_cast<char*>(text.c_str()));
  pointers.push_back(nullptr);
  return pointers;
}

// The shim in a session of its own, with `socket` as its only inherited descriptor.
absl::StatusOr<pid_t> SpawnShim(const std::string& binary, const ShimOptions& shim, int socket,
                                const std::vector<std::string>& environment) {
  std::vector<std::string> arguments = ShimArguments(shim);
  arguments.insert(arguments.begin(), binary);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  const std::string errors = shim.run_directory + kShimErrorFile;
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, errors.c_str(),
                                   O_WRONLY | O_CREAT | O_APPEND, 0644);
  posix_spawn_file_actions_adddup2(&files, STDOUT_FILENO, STDERR_FILENO);
  posix_spawn_file_actions_adddup2(&files, socket, kShimSocket);
  posix_spawn_file_actions_addclosefrom_np(&files, kShimSocket + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  sigset_t all;
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setflags(&attributes,
                           POSIX_SPAWN_SETSID | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, binary.c_str(), &files, &attributes,
                                  Pointers(arguments).data(), Pointers(environment).data());
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("cannot start ", binary, ": ", std::strerror(error)));
  }
  return pid;
}

class Host : public ProcessHost {
 public:
  Host(ProcessHostOptions options, const Clock& clock, std::shared_ptr<Logger> log,
       std::function<void(DaemonEvent)> post)
      : options_(std::move(options)),
        clock_(clock),
        log_(std::move(log)),
        post_(std::move(post)),
        epoll_(::epoll_create1(EPOLL_CLOEXEC)),
        wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    CHECK(epoll_.valid() && wake_.valid()) << std::strerror(errno);
    Watch(wake_.get(), 0);
    thread_ = std::thread([this] { Run(); });
  }
  ~Host() override {
    Post([this] { stopping_ = true; });
    thread_.join();
  }

  void Carry(PrepareAttempt action) override {
    Post([this, action = std::move(action)] { Prepare(action); });
  }
  void Carry(StartRank action) override {
    Post([this, action = std::move(action)] { StartOne(action); });
  }
  void Carry(AttachRank action) override {
    Post([this, action = std::move(action)] { Attach(action.rank); });
  }
  void Carry(SignalRank action) override {
    Post([this, action = std::move(action)] { Signal(action.rank, action.kill); });
  }
  void Carry(VerifyRelease action) override {
    Post([this, action = std::move(action)] { Release(action.rank, kRetry); });
  }
  void Prune(std::set<std::string> held) override {
    Post([this, held = std::move(held)] { PruneNow(held); });
  }
  void EndAll(absl::Duration grace, absl::Duration patience) override;

 private:
  // A rank whose shim may run.
  struct Process {
    RankKey key;
    uint64_t watch = 0;  // names this entry in epoll events and timers
    UniqueFd handshake;  // until the rank runs
    UniqueFd shim;       // pidfds
    UniqueFd rank;
    pid_t rank_pid = 0;
    std::string boot_id;
  };

  // A shim that this daemon started, and so has to reap.
  struct Shim {
    pid_t pid = 0;
    UniqueFd pidfd;
  };

  std::string RunDirectory(const RankKey& key) const {
    return absl::StrCat(options_.attempts_directory, "/", RunDirectoryName(key));
  }

  void Post(absl::AnyInvocable<void()> work) {
    {
      MutexLock lock(&mutex_);
      work_.push_back(std::move(work));
    }
    const uint64_t one = 1;
    (void)!::write(wake_.get(), &one, sizeof(one));
  }
  void After(absl::Duration delay, absl::AnyInvocable<void()> work) {
    timers_.emplace(clock_.Monotonic() + delay, std::move(work));
  }
  void Watch(int fd, uint64_t watch) {
    epoll_event event = {};
    event.events = EPOLLIN;
    event.data.u64 = watch;
    CHECK_EQ(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event), 0) << std::strerror(errno);
  }
  void Unwatch(int fd) { ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr); }

  void Run();
  void RunTimersAndWork();
  void Ready(uint64_t watch);

  void Prepare(const PrepareAttempt& action);
  void StartOne(const StartRank& action);
  absl::Status Launch(const StartRank& action);
  void ReadHandshake(Process& process);
  void Attach(const RankKey& key);
  void AwaitEnd(const RankKey& key);
  void Bury(const RankKey& key, const std::string& boot_id, pid_t rank_pid);
  void Signal(const RankKey& key, bool kill);
  void Release(const RankKey& key, absl::Duration retry);
  void PruneNow(const std::set<std::string>& held);
  v1::RankExit Explain(const RankKey& key, pid_t pid, const std::string& boot_id,
                       std::optional<v1::RankProgress>* progress) const;

  const ProcessHostOptions options_;
  const Clock& clock_;
  const std::shared_ptr<Logger> log_;
  const std::function<void(DaemonEvent)> post_;
  UniqueFd epoll_;
  UniqueFd wake_;

  Mutex mutex_;
  std::deque<absl::AnyInvocable<void()>> work_ ABSL_GUARDED_BY(mutex_);
  int processes_alive_ ABSL_GUARDED_BY(mutex_) = 0;  // as of the last turn of the thread

  // On the thread only.
  bool stopping_ = false;
  uint64_t next_watch_ = 1;
  std::map<RankKey, Process> processes_;
  std::map<uint64_t, RankKey> watches_;
  std::multimap<absl::Duration, absl::AnyInvocable<void()>> timers_;
  std::map<uint64_t, Shim> shims_;  // by watch
  std::thread thread_;
};

void Host::Run() {
  while (!stopping_) {
    int timeout_ms = -1;
    if (!timers_.empty()) {
      const absl::Duration wait = timers_.begin()->first - clock_.Monotonic();
      timeout_ms = static_cast<int>(
          std::max<int64_t>(0, absl::ToInt64Milliseconds(wait + absl::Microseconds(999))));
    }
    epoll_event events[64];
    const int count = ::epoll_wait(epoll_.get(), events, 64, timeout_ms);
    for (int i = 0; i < count; ++i) {
      if (events[i].data.u64 != 0) Ready(events[i].data.u64);
    }
    RunTimersAndWork();
    MutexLock lock(&mutex_);
    processes_alive_ = static_cast<int>(processes_.size() + shims_.size());
  }
}

void Host::RunTimersAndWork() {
  uint64_t ignored;
  (void)!::read(wake_.get(), &ignored, sizeof(ignored));
  std::deque<absl::AnyInvocable<void()>> work;
  {
    MutexLock lock(&mutex_);
    work.swap(work_);
  }
  for (auto& item : work) item();
  while (!timers_.empty() && timers_.begin()->first <= clock_.Monotonic()) {
    absl::AnyInvocable<void()> due = std::move(timers_.begin()->second);
    timers_.erase(timers_.begin());
    due();
  }
}

void Host::Ready(uint64_t watch) {
  if (const auto shim = shims_.find(watch); shim != shims_.end()) {
    ::waitpid(shim->second.pid, nullptr, WNOHANG);
    shims_.erase(shim);
    return;
  }
  const auto found = watches_.find(watch);
  if (found == watches_.end()) return;
  const RankKey key = found->second;
  Process& process = processes_.at(key);
  if (process.handshake.valid()) {
    ReadHandshake(process);
  } else {
    Unwatch(process.rank.get());
    AwaitEnd(key);
  }
}

// ---- preparing and starting ---------------------------------------------------------------------

void Host::Prepare(const PrepareAttempt& action) {
  AttemptPrepared answer{action.attempt, absl::OkStatus()};
  for (const v1::RankAssignment& rank : action.ranks) {
    const std::string& working = rank.spec().working_directory();
    struct stat info = {};
    if (!working.empty() && (::stat(working.c_str(), &info) != 0 || !S_ISDIR(info.st_mode))) {
      answer.status = absl::NotFoundError(absl::StrCat(
          "working_directory ", working, " is not a directory on worker ", options_.worker));
      answer.cause = v1::CAUSE_USER_ERROR;
      break;
    }
    if (!options_.command && ::access(options_.rank_binary.c_str(), X_OK) != 0) {
      answer.status = absl::NotFoundError(absl::StrCat(
          "worker ", options_.worker, " has no rank program at ", options_.rank_binary));
      answer.cause = v1::CAUSE_LAUNCH;
      break;
    }
    answer.status = PosixFileSystem()->MakeDirectory(rank.run_directory());
    if (!answer.status.ok()) {
      answer.cause = v1::CAUSE_STORAGE;
      break;
    }
  }
  post_(std::move(answer));
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

absl::Status Host::Launch(const StartRank& action) {
  const std::string run_directory = RunDirectory(action.rank);
  const std::unique_ptr<FileSystem> files = PosixFileSystem();
  RETURN_IF_ERROR(files->MakeDirectory(run_directory));
  const std::string assignment_path = run_directory + kAssignmentFile;
  RETURN_IF_ERROR(files->WriteAtomically(assignment_path, action.assignment.SerializeAsString()));
  ShimOptions shim;
  shim.run_directory = run_directory;
  shim.working_directory = action.assignment.spec().working_directory();
  if (shim.working_directory.empty()) shim.working_directory = run_directory;
  shim.log = options_.log;
  shim.command = options_.command ? options_.command(action.assignment)
                                  : std::vector<std::string>{options_.rank_binary, "--assignment",
                                                             assignment_path};
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::UnavailableError(absl::StrCat("socketpair: ", std::strerror(errno)));
  }
  Process& process = processes_[action.rank];
  process = Process();
  process.key = action.rank;
  process.handshake.Reset(sockets[0]);
  UniqueFd theirs(sockets[1]);
  ASSIGN_OR_RETURN(const pid_t pid, SpawnShim(options_.shim_binary, shim, theirs.get(),
                                              RankEnvironment(action.assignment)));
  Shim& child = shims_[next_watch_];
  child.pid = pid;
  child.pidfd.Reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  CHECK(child.pidfd.valid()) << std::strerror(errno);  // unreaped, so it exists
  Watch(child.pidfd.get(), next_watch_++);
  process.watch = next_watch_++;
  watches_[process.watch] = action.rank;
  Watch(process.handshake.get(), process.watch);
  return absl::OkStatus();
}

void Host::ReadHandshake(Process& process) {
  const RankKey key = process.key;
  char word = 0;
  const ssize_t got = ::read(process.handshake.get(), &word, 1);
  if (got < 0 && errno == EINTR) return;
  if (got == 1 && word == kShimLocked) {
    const char go = kShimGo;
    (void)!::write(process.handshake.get(), &go, 1);
    return;
  }
  // Running, or the shim has given up: what is on disk tells.
  Unwatch(process.handshake.get());
  watches_.erase(process.watch);
  processes_.erase(key);
  if (ReadShimRecord(RunDirectory(key)).has_value()) return Attach(key);
  post_(RankNotStarted{key,
                       absl::UnavailableError(absl::StrCat(
                           "the supervisor of ", ToString(key), " could not start on worker ",
                           options_.worker, ": ", Excerpt(RunDirectory(key) + kShimErrorFile))),
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
      // A shim that got its word to go is about to write the record.
      After(kRetry, [this, key] { Attach(key); });
      return;
    }
    if (ReadShimRecord(run_directory).has_value()) return Attach(key);
    post_(RankNotStarted{key, absl::OkStatus()});
    return;
  }
  const pid_t rank_pid = static_cast<pid_t>(record->rank_pid());
  UniqueFd shim;
  if (record->boot_id() == BootId()) {
    shim = OpenProcess(static_cast<pid_t>(record->shim_pid()), record->shim_start_time());
  }
  if (!shim.valid()) return Bury(key, record->boot_id(), rank_pid);
  Process& process = processes_[key];
  process.key = key;
  process.shim = std::move(shim);
  process.rank = OpenProcess(rank_pid, record->rank_start_time());
  process.rank_pid = rank_pid;
  process.boot_id = record->boot_id();
  if (!process.rank.valid()) return AwaitEnd(key);
  process.watch = next_watch_++;
  watches_[process.watch] = key;
  Watch(process.rank.get(), process.watch);
  post_(RankStarted{key, rank_pid, ReadCommitRequests(run_directory)});
}

// The rank has ended; its shim is about to say how.
void Host::AwaitEnd(const RankKey& key) {
  const auto found = processes_.find(key);
  if (found == processes_.end()) return;
  const bool shim_ended = HasEnded(found->second.shim);  // before the look at the file
  if (!ReadShimExit(RunDirectory(key)).has_value() && !shim_ended) {
    After(kRetry, [this, key] { AwaitEnd(key); });
    return;
  }
  const pid_t rank_pid = found->second.rank_pid;
  const std::string boot_id = found->second.boot_id;
  watches_.erase(found->second.watch);
  processes_.erase(found);
  Bury(key, boot_id, rank_pid);
}

void Host::Bury(const RankKey& key, const std::string& boot_id, pid_t rank_pid) {
  RankExited event{key, rank_pid};
  event.exit = Explain(key, rank_pid, boot_id, &event.progress);
  event.commits = ReadCommitRequests(RunDirectory(key));
  post_(std::move(event));
}

v1::RankExit Host::Explain(const RankKey& key, pid_t pid, const std::string& boot_id,
                           std::optional<v1::RankProgress>* progress) const {
  const std::string run_directory = RunDirectory(key);
  const std::string who =
      absl::StrCat(ToString(key), " (pid ", pid, ", worker ", options_.worker, ")");
  const std::string log = absl::StrCat("; log: ", run_directory, kLogDirectory);
  const std::optional<v1::ShimExit> shim = ReadShimExit(run_directory);
  const std::optional<v1::RankExitReport> report = ReadRankExitReport(run_directory);
  v1::RankExit exit;
  exit.set_code(shim.has_value() ? shim->code() : -1);
  exit.set_signal(shim.has_value() ? shim->signal() : 0);
  if (report.has_value() && report->has_progress()) *progress = report->progress();
  if (report.has_value() && report->cause() != v1::CAUSE_UNSPECIFIED) {
    exit.set_cause(report->cause());
    exit.set_message(report->message().substr(0, kExitMessageBytesMax));
    if (report->has_peer()) exit.set_peer(report->peer());
  } else if (!shim.has_value() && boot_id != BootId()) {
    exit.set_cause(v1::CAUSE_WORKER_LOST);
    exit.set_message(absl::StrCat(who, " ended when the machine went down", log));
  } else if (!shim.has_value()) {
    exit.set_cause(v1::CAUSE_CRASH);
    exit.set_signal(SIGKILL);
    exit.set_message(absl::StrCat(who, " was killed along with its supervisor", log));
  } else if (!shim->error().empty()) {
    exit.set_cause(v1::CAUSE_LAUNCH);
    exit.set_message(absl::StrCat(who, ": ", shim->error()));
  } else if (shim->out_of_memory()) {
    exit.set_cause(v1::CAUSE_OUT_OF_MEMORY);
    exit.set_message(absl::StrCat(who, " was killed by the kernel for lack of memory", log));
  } else if (shim->signal() != 0) {
    exit.set_cause(v1::CAUSE_CRASH);
    // Users of containers and network disks meet this one.
    const char* hint =
        shim->signal() == SIGBUS
            ? ": a file that it had in memory became shorter or could not be read (a "
              "data set), or /dev/shm is full"
            : "";
    exit.set_message(
        absl::StrCat(who, " was ended by signal ", SignalName(shim->signal()), hint, log));
  } else if (shim->code() != 0) {
    exit.set_cause(v1::CAUSE_CRASH);
    exit.set_message(
        absl::StrCat(who, " exited with status ", shim->code(), " and left no report", log));
  } else {
    exit.set_cause(v1::CAUSE_COMPLETED);
    exit.set_message(absl::StrCat(who, " exited with status 0"));
  }
  return exit;
}

// ---- ending -------------------------------------------------------------------------------------

void Host::Signal(const RankKey& key, bool kill) {
  const auto found = processes_.find(key);
  // Its leader unreaped, a process group's number cannot name another group.
  if (found == processes_.end() || HasEnded(found->second.rank)) return;
  ::kill(-found->second.rank_pid, kill ? SIGKILL : SIGTERM);
}

void Host::Release(const RankKey& key, absl::Duration retry) {
  const std::string run_directory = RunDirectory(key);
  const std::optional<v1::ShimRecord> record = ReadShimRecord(run_directory);
  bool clean = true;
  pid_t session = 0;
  if (record.has_value() && record->boot_id() == BootId()) {
    // After a rank's number was reused its session would be another's; the shim's cleaning comes
    // first, and a living leader is recognised by its start time.
    const pid_t rank_pid = static_cast<pid_t>(record->rank_pid());
    const std::optional<ProcessStat> leader = ReadProcessStat(rank_pid);
    if (!leader.has_value() || leader->start_time == record->rank_start_time()) session = rank_pid;
    if (OpenProcess(static_cast<pid_t>(record->shim_pid()), record->shim_start_time()).valid()) {
      clean = false;
    }
  }
  for (const pid_t pid : FindProcesses(session, kRunDirectoryVariable, run_directory)) {
    clean = false;
    ::kill(pid, SIGKILL);
  }
  if (clean) {
    post_(ReleaseProven{key});
    return;
  }
  After(retry, [this, key, retry] { Release(key, std::min(retry * 2, kReleaseRetryMax)); });
}

void Host::PruneNow(const std::set<std::string>& held) {
  namespace fs = std::filesystem;
  std::error_code error;
  std::vector<std::pair<fs::file_time_type, fs::path>> ended;
  for (fs::directory_iterator it(options_.attempts_directory, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code gone;
    const auto written = it->last_write_time(gone);
    if (!gone && held.count(it->path().filename().string()) == 0) {
      ended.emplace_back(written, it->path());
    }
  }
  std::sort(ended.begin(), ended.end());
  for (size_t i = 0; i + kAttemptsKept < ended.size(); ++i) {
    std::error_code failed;
    fs::remove_all(ended[i].second, failed);
    if (failed) {
      log_->Warning("cannot remove an old run directory",
                    {{"path", ended[i].second.string()}, {"error", failed.message()}});
    }
  }
}

void Host::EndAll(absl::Duration grace, absl::Duration patience) {
  const auto none_left = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return work_.empty() && processes_alive_ == 0;
  };
  for (const auto& [kill, wait] : {std::pair(false, grace), std::pair(true, patience)}) {
    Post([this, kill = kill] {
      for (const auto& [key, process] : processes_) Signal(key, kill);
    });
    MutexLock lock(&mutex_);
    if (mutex_.AwaitWithTimeout(Condition(&none_left), wait)) return;
  }
}

}  // namespace

std::unique_ptr<ProcessHost> ProcessHost::Start(ProcessHostOptions options, const Clock& clock,
                                                std::shared_ptr<Logger> log,
                                                std::function<void(DaemonEvent)> post) {
  return std::make_unique<Host>(std::move(options), clock, std::move(log), std::move(post));
}

}  // namespace muster::worker
