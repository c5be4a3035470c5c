// Real processes: /bin/sh as a scripted rank, under the real shim. Tests wait for events, each with
// a deadline.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <deque>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/file_system.h"
#include "base/mutex.h"
#include "base/proc.h"
#include "tests/support/status_matchers.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/process_host.h"
#include "worker/daemon/run_files.h"
#include "worker/daemon/shim.h"
#include "worker/daemon/sockets.h"

namespace muster::worker {
namespace {

using ::muster::testing::IsOk;
using ::muster::testing::StatusIs;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr absl::Duration kPatience = absl::Seconds(30);
const RankKey kRank{{JobId("job-a"), Epoch(2)}, 0};

// Events of the host, in order.
class Events {
 public:
  void Add(DaemonEvent event) {
    MutexLock lock(&mutex_);
    events_.push_back(std::move(event));
  }
  // Waits for the next event, which must be of type Event.
  template <typename Event>
  Event Next() {
    MutexLock lock(&mutex_);
    auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !events_.empty(); };
    if (!mutex_.AwaitWithTimeout(Condition(&any), kPatience)) {
      ADD_FAILURE() << "no event came";
      return {};
    }
    DaemonEvent event = std::move(events_.front());
    events_.pop_front();
    if (const Event* match = std::get_if<Event>(&event)) return *match;
    ADD_FAILURE() << "another event came: index " << event.index();
    return {};
  }
  // A rank that ends at once may be reported as exited without having been reported as started.
  RankExited NextExit() {
    {
      MutexLock lock(&mutex_);
      auto any = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return !events_.empty(); };
      mutex_.AwaitWithTimeout(Condition(&any), kPatience);
      if (!events_.empty() && std::holds_alternative<RankStarted>(events_.front())) {
        events_.pop_front();
      }
    }
    return Next<RankExited>();
  }

 private:
  Mutex mutex_;
  std::deque<DaemonEvent> events_ ABSL_GUARDED_BY(mutex_);
};

class ProcessTest : public ::testing::Test {
 protected:
  ProcessTest() {
    std::string name = ::testing::TempDir() + "muster-process-XXXXXX";
    directory_ = ::mkdtemp(name.data());
    log_.bytes_max = 1000;
    log_.files_max = 3;
    NewHost();
  }
  ~ProcessTest() override {
    // Kills what a failed test has left.
    for (const pid_t pid : FindProcesses(0, kRunDirectoryVariable, RunDirectory())) {
      ::kill(pid, SIGKILL);
    }
    host_.reset();
    std::error_code ignored;
    std::filesystem::remove_all(directory_, ignored);
  }

  // Restarts the host, as a restart of the daemon does: the new one knows nothing.
  void NewHost() {
    host_.reset();
    ProcessHostOptions options;
    options.attempts_directory = directory_;
    options.shim_binary = MUSTER_WORKER_BINARY;
    options.rank_binary = "/nonexistent/muster-rank";
    options.worker = "w0";
    options.log = log_;
    options.files = files_;
    options.command = [this](const v1::RankAssignment&) { return command_; };
    options.device_bytes = [this](const std::string& device) -> std::optional<int64_t> {
      if (device != "cuda:1") return std::nullopt;
      return device_bytes_.load();
    };
    options.device_patience = device_patience_;
    options.prune_after = prune_after_;
    host_ = ProcessHost::Start(options, clock_, Logger::Discard(),
                               [this](DaemonEvent event) { events_.Add(std::move(event)); });
  }

  std::string RunDirectory() const { return directory_ + "/" + RunDirectoryName(kRank); }
  v1::RankAssignment Assignment() const {
    v1::RankAssignment assignment;
    assignment.set_job_id("job-a");
    assignment.set_epoch(2);
    assignment.set_threads(3);
    assignment.set_run_directory(RunDirectory());
    return assignment;
  }
  void Script(const std::string& script) { command_ = {"/bin/sh", "-c", script}; }
  void Run() { host_->Carry(StartRank{kRank, Assignment()}); }
  // Starts a script that runs until it is told to end.
  int64_t StartScript(const std::string& script) {
    Script(script);
    Run();
    return events_.Next<RankStarted>().pid;
  }
  // A named pipe in the directory, through which scripts tell the test where they are.
  std::string Fifo(const std::string& name) {
    const std::string path = directory_ + "/" + name;
    EXPECT_EQ(::mkfifo(path.c_str(), 0600), 0);
    return path;
  }
  // Waits for the script to write a line.
  static std::string ReadLine(const std::string& fifo) {
    std::ifstream file(fifo);
    std::string line;
    std::getline(file, line);
    return line;
  }
  std::string Log() {
    absl::StatusOr<LogChunk> chunk = ReadLog(RunDirectory() + kLogDirectory, 0, 1 << 20);
    return chunk.ok() ? chunk->data : chunk.status().ToString();
  }

  RealClock clock_;
  std::string directory_;
  LogLimits log_;
  JobFilePolicy files_;
  std::atomic<int64_t> device_bytes_ = 1 << 30;
  absl::Duration device_patience_ = absl::Hours(1);
  absl::Duration prune_after_ = absl::Seconds(5);
  std::vector<std::string> command_;
  Events events_;
  std::unique_ptr<ProcessHost> host_;
};

TEST_F(ProcessTest, Rank_Exits_StatusAndOutputAreKept) {
  Script("echo out; echo err >&2; echo threads $OMP_NUM_THREADS; exit 7");
  Run();
  const RankExited exited = events_.NextExit();
  EXPECT_EQ(exited.exit.code(), 7);
  EXPECT_EQ(exited.exit.signal(), 0);
  EXPECT_EQ(exited.exit.cause(), v1::CAUSE_CRASH);
  EXPECT_THAT(exited.exit.message(), HasSubstr("job-a epoch 2 rank 0"));
  EXPECT_EQ(Log(), "out\nerr\nthreads 3\n");
}

TEST_F(ProcessTest, Rank_KilledWithSigkill_IsNoticedWithinASecond) {
  const int64_t pid = StartScript("exec sleep 1000");
  const absl::Duration start = clock_.Monotonic();
  ASSERT_EQ(::kill(static_cast<pid_t>(pid), SIGKILL), 0);
  const RankExited exited = events_.Next<RankExited>();
  EXPECT_LT(clock_.Monotonic() - start, absl::Seconds(1));
  EXPECT_EQ(exited.exit.signal(), SIGKILL);
  EXPECT_EQ(exited.exit.code(), -1);
  EXPECT_EQ(exited.exit.cause(), v1::CAUSE_CRASH);
  EXPECT_THAT(exited.exit.message(), HasSubstr("SIGKILL"));
  EXPECT_THAT(exited.exit.message(), HasSubstr(RunDirectory()));
}

// A rank gets SIGBUS when a data set that it has mapped is truncated.
TEST_F(ProcessTest, Rank_EndedByABusError_MessageSaysWhatThatMeans) {
  Script("kill -BUS $$");
  Run();
  const RankExited exited = events_.NextExit();
  EXPECT_EQ(exited.exit.signal(), SIGBUS);
  EXPECT_THAT(exited.exit.message(), HasSubstr("SIGBUS"));
  EXPECT_THAT(exited.exit.message(), HasSubstr("data set"));
}

TEST_F(ProcessTest, Rank_LeavesItsReport_CauseAndProgressAreTaken) {
  Script("exit 1");
  v1::RankExitReport report;
  report.set_cause(v1::CAUSE_DATA);
  report.set_message("no such data set");
  report.mutable_progress()->set_step(12);
  ASSERT_THAT(PosixFileSystem()->MakeDirectory(RunDirectory()), IsOk());
  ASSERT_THAT(PosixFileSystem()->WriteAtomically(RunDirectory() + kRankExitFile,
                                                 report.SerializeAsString()),
              IsOk());
  Run();
  const RankExited exited = events_.NextExit();
  EXPECT_EQ(exited.exit.cause(), v1::CAUSE_DATA);
  EXPECT_EQ(exited.exit.message(), "no such data set");
  ASSERT_TRUE(exited.progress.has_value());
  EXPECT_EQ(exited.progress->step(), 12);
}

TEST_F(ProcessTest, Daemon_Restarts_RunningRankIsFoundAgainAndItsExitIsExact) {
  const std::string go = Fifo("go");
  const int64_t pid = StartScript(absl::StrCat("read line < ", go, "; echo late; exit 42"));
  NewHost();
  host_->Carry(AttachRank{kRank});
  EXPECT_EQ(events_.Next<RankStarted>().pid, pid);
  std::ofstream(go) << "go\n";
  const RankExited exited = events_.Next<RankExited>();
  EXPECT_EQ(exited.pid, pid);
  EXPECT_EQ(exited.exit.code(), 42);
  EXPECT_EQ(Log(), "late\n");  // written under the second daemon
}

TEST_F(ProcessTest, Rank_EndsWhileNoDaemonRuns_ExitIsExact) {
  const std::string go = Fifo("go");
  const int64_t pid = StartScript(absl::StrCat("read line < ", go, "; exit 42"));
  const std::optional<v1::ShimRecord> record = ReadShimRecord(RunDirectory());
  ASSERT_TRUE(record.has_value());
  const UniqueFd rank = OpenProcess(static_cast<pid_t>(pid), record->rank_start_time());
  ASSERT_TRUE(rank.valid());
  host_.reset();
  std::ofstream(go) << "go\n";
  pollfd ended = {rank.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&ended, 1, 30000), 1);
  NewHost();
  host_->Carry(AttachRank{kRank});
  EXPECT_EQ(events_.NextExit().exit.code(), 42);
}

TEST_F(ProcessTest, Rank_OrderedTwice_RunsOnce) {
  const std::string count = directory_ + "/count";
  Script(absl::StrCat("echo run >> ", count, "; exit 0"));
  Run();
  EXPECT_EQ(events_.NextExit().exit.cause(), v1::CAUSE_COMPLETED);
  Run();
  EXPECT_EQ(events_.Next<RankExited>().exit.code(), 0);
  std::stringstream runs;
  runs << std::ifstream(count).rdbuf();
  EXPECT_EQ(runs.str(), "run\n");
}

TEST_F(ProcessTest, Attach_ToARankNeverStarted_SaysSo) {
  host_->Carry(AttachRank{kRank});
  EXPECT_THAT(events_.Next<RankNotStarted>().why, IsOk());
}

TEST_F(ProcessTest, Stop_Asked_TermReachesTheGroupKillEndsTheStubborn) {
  const std::string ready = Fifo("ready");
  const std::string term = Fifo("term");
  StartScript(absl::StrCat("trap 'echo term > ", term, "' TERM; echo up > ", ready,
                           "; while :; do sleep 1000 & wait; done"));
  EXPECT_EQ(ReadLine(ready), "up");
  host_->Carry(SignalRank{kRank, /*kill=*/false});
  EXPECT_EQ(ReadLine(term), "term");
  host_->Carry(SignalRank{kRank, /*kill=*/true});
  EXPECT_EQ(events_.Next<RankExited>().exit.signal(), SIGKILL);
}

TEST_F(ProcessTest, Orphans_InSessionsOfTheirOwn_AreGoneOnceReleaseIsProven) {
  const std::string child = Fifo("child");
  const int64_t pid = StartScript(
      absl::StrCat("setsid sh -c 'echo $$ > ", child, "; exec sleep 1000' & exec sleep 1000"));
  const pid_t orphan = static_cast<pid_t>(std::stol(ReadLine(child)));
  ASSERT_TRUE(ReadProcessStat(orphan).has_value());
  ::kill(static_cast<pid_t>(pid), SIGKILL);
  events_.Next<RankExited>();
  host_->Carry(VerifyRelease{kRank});
  events_.Next<ReleaseProven>();
  const std::optional<ProcessStat> stat = ReadProcessStat(orphan);
  EXPECT_TRUE(!stat.has_value() || stat->state == 'Z');
  EXPECT_THAT(FindProcesses(0, kRunDirectoryVariable, RunDirectory()), ElementsAre());
}

// The rank has handed its socket to a process that it did not start.
TEST_F(ProcessTest, PortHeldByAStranger_IsClosedOnceReleaseIsProven) {
  const std::string take = directory_ + "/take.py", give = directory_ + "/give.py";
  const std::string ready = Fifo("ready");
  std::ofstream(take) << "import signal, socket\n"
                         "s = socket.socket(socket.AF_UNIX)\n"
                         "s.bind('"
                      << directory_
                      << "/socket')\n"
                         "s.listen()\n"
                         "open('"
                      << ready
                      << "', 'w').write('listens\\n')\n"
                         "kept = socket.recv_fds(s.accept()[0], 1, 1)\n"
                         "signal.pause()\n";
  std::ofstream(give) << "import signal, socket\n"
                         "s = socket.create_server(('127.0.0.1', 0))\n"
                         "u = socket.socket(socket.AF_UNIX)\n"
                         "u.connect('"
                      << directory_
                      << "/socket')\n"
                         "socket.send_fds(u, [b'x'], [s.fileno()])\n"
                         "signal.pause()\n";
  pid_t stranger = 0;
  std::string python = "python3", script = take;
  char* const arguments[] = {python.data(), script.data(), nullptr};
  ASSERT_EQ(::posix_spawnp(&stranger, "python3", nullptr, nullptr, arguments, environ), 0);
  EXPECT_EQ(ReadLine(ready), "listens");
  const int64_t pid = StartScript("exec python3 " + give);
  // The daemon has recorded the socket, and the stranger holds it.
  std::optional<v1::HeldByRank> held;
  uint64_t inode = 0;
  const absl::Duration start = clock_.Monotonic();
  while (clock_.Monotonic() - start < kPatience) {
    held = ReadHeld(RunDirectory());
    if (held.has_value() && held->listening_ports_size() == 1) {
      inode = held->listening_ports().begin()->first;
      if (HoldersOf({inode}).size() == 2) break;
    }
    ::poll(nullptr, 0, 5);
  }
  ASSERT_NE(inode, 0u);
  EXPECT_EQ(AllListeningSockets()[inode], held->listening_ports().begin()->second);
  ASSERT_EQ(::kill(static_cast<pid_t>(pid), SIGKILL), 0);
  events_.Next<RankExited>();
  EXPECT_THAT(HoldersOf({inode}), ElementsAre(stranger)) << "the port is still open";
  NewHost();  // a daemon that was started meanwhile proves it too
  host_->Carry(VerifyRelease{kRank});
  events_.Next<ReleaseProven>();
  EXPECT_FALSE(AllListeningSockets().contains(inode));
  int status = 0;
  ASSERT_EQ(::waitpid(stranger, &status, 0), stranger);
  EXPECT_EQ(WTERMSIG(status), SIGKILL);
}

// The rank reads it as soon as it is told, which is after the answer.
TEST_F(ProcessTest, NewAssignment_IsInTheRunDirectoryWhenItIsAnswered) {
  StartScript("exec sleep 1000");
  v1::RankAssignment assignment = Assignment();
  assignment.set_membership(2);
  host_->Carry(ReassignRank{kRank, assignment});
  const RankReassigned answer = events_.Next<RankReassigned>();
  EXPECT_THAT(answer.status, IsOk());
  EXPECT_EQ(answer.membership, 2u);
  v1::RankAssignment written;
  std::ifstream file(RunDirectory() + "/assignment.pb", std::ios::binary);
  ASSERT_TRUE(written.ParseFromIstream(&file));
  EXPECT_EQ(written.membership(), 2u);
  host_->Carry(SignalRank{kRank, /*kill=*/true});
  events_.Next<RankExited>();
  std::filesystem::remove_all(RunDirectory());
  host_->Carry(ReassignRank{kRank, assignment});
  EXPECT_THAT(events_.Next<RankReassigned>().status, Not(IsOk()));
}

TEST_F(ProcessTest, DeviceMemory_HoldsBackTheReleaseUntilItIsBack) {
  v1::RankAssignment assignment = Assignment();
  assignment.set_device("cuda:1");
  Script("exit 0");
  host_->Carry(StartRank{kRank, assignment});
  events_.NextExit();
  device_bytes_ = int64_t{3} << 30;
  host_->Carry(VerifyRelease{kRank});
  // Another rank's device is not concerned; its answer shows that the first check has been made.
  const RankKey other = {{JobId("job-b"), Epoch(1)}, 0};
  host_->Carry(VerifyRelease{other});
  EXPECT_EQ(events_.Next<ReleaseProven>().rank, other);
  device_bytes_ = (int64_t{1} << 30) + (100 << 20);
  EXPECT_EQ(events_.Next<ReleaseProven>().rank, kRank);
}

TEST_F(ProcessTest, DeviceMemoryOfOthersThatShareIt_HoldsBackTheLastReleaseAlone) {
  const std::string more = Fifo("more");
  v1::RankAssignment assignment = Assignment();
  assignment.set_device("cuda:1");
  Script(absl::StrCat("read line < ", more));
  host_->Carry(StartRank{kRank, assignment});
  events_.Next<RankStarted>();
  device_bytes_ = int64_t{2} << 30;  // the first rank's
  const RankKey second = {{JobId("job-b"), Epoch(1)}, 0};
  v1::RankAssignment beside = assignment;
  beside.set_job_id("job-b");
  beside.set_epoch(1);
  beside.set_run_directory(directory_ + "/" + RunDirectoryName(second));
  Script("exit 0");
  host_->Carry(StartRank{second, beside});
  events_.NextExit();
  device_bytes_ = int64_t{4} << 30;
  host_->Carry(VerifyRelease{second});
  EXPECT_EQ(events_.Next<ReleaseProven>().rank, second) << "the first one's memory is in use";
  std::ofstream(more) << "end" << std::endl;
  events_.NextExit();
  host_->Carry(VerifyRelease{kRank});
  const RankKey other = {{JobId("job-c"), Epoch(1)}, 0};
  host_->Carry(VerifyRelease{other});
  EXPECT_EQ(events_.Next<ReleaseProven>().rank, other) << "what the second left is not back";
  device_bytes_ = int64_t{1} << 30;
  EXPECT_EQ(events_.Next<ReleaseProven>().rank, kRank);
}

TEST_F(ProcessTest, RankThatSharesAGpuUnderMps_IsHeldToItsShare) {
  v1::RankAssignment assignment = Assignment();
  assignment.set_device("cuda:1");
  assignment.mutable_spec()->mutable_resources()->set_share(0.25);
  assignment.set_device_memory_limit_bytes(int64_t{20} << 30);
  assignment.set_mps(true);
  Script("echo $CUDA_MPS_ACTIVE_THREAD_PERCENTAGE $CUDA_MPS_PINNED_DEVICE_MEM_LIMIT; exit 0");
  host_->Carry(StartRank{kRank, assignment});
  events_.NextExit();
  EXPECT_EQ(Log(), "25 1=20480M\n");
}

TEST_F(ProcessTest, DeviceMemoryThatDoesNotComeBack_MakesTheDeviceUnusable) {
  device_patience_ = absl::Milliseconds(20);
  NewHost();
  v1::RankAssignment assignment = Assignment();
  assignment.set_device("cuda:1");
  Script("exit 0");
  host_->Carry(StartRank{kRank, assignment});
  events_.NextExit();
  device_bytes_ = int64_t{3} << 30;
  host_->Carry(VerifyRelease{kRank});
  const DeviceFailed failed = events_.Next<DeviceFailed>();
  EXPECT_EQ(failed.device, "cuda:1");
  EXPECT_THAT(failed.why, HasSubstr("2048 MiB more than before"));
  EXPECT_EQ(events_.Next<ReleaseProven>().rank, kRank);
}

TEST_F(ProcessTest, Shim_Killed_RankAndOrphansEndToo) {
  const std::string child = Fifo("child");
  StartScript(
      absl::StrCat("setsid sh -c 'echo $$ > ", child, "; exec sleep 1000' & exec sleep 1000"));
  const pid_t orphan = static_cast<pid_t>(std::stol(ReadLine(child)));
  const std::optional<v1::ShimRecord> record = ReadShimRecord(RunDirectory());
  ASSERT_TRUE(record.has_value());
  ::kill(static_cast<pid_t>(record->shim_pid()), SIGKILL);
  const RankExited exited = events_.Next<RankExited>();
  EXPECT_EQ(exited.exit.cause(), v1::CAUSE_CRASH);
  EXPECT_THAT(exited.exit.message(), HasSubstr("supervisor"));
  host_->Carry(VerifyRelease{kRank});
  events_.Next<ReleaseProven>();
  const std::optional<ProcessStat> stat = ReadProcessStat(orphan);
  EXPECT_TRUE(!stat.has_value() || stat->state == 'Z');
}

TEST_F(ProcessTest, Program_Missing_IsALaunchFailureThatNamesIt) {
  command_ = {"/nonexistent/program"};
  Run();
  const RankExited exited = events_.NextExit();
  EXPECT_EQ(exited.exit.cause(), v1::CAUSE_LAUNCH);
  EXPECT_THAT(exited.exit.message(), HasSubstr("/nonexistent/program"));
}

TEST_F(ProcessTest, WorkingDirectory_Missing_IsTheUsersError) {
  v1::RankAssignment assignment = Assignment();
  assignment.mutable_spec()->set_working_directory("/nonexistent/place");
  host_->Carry(PrepareAttempt{kRank.attempt, {assignment}});
  const AttemptPrepared prepared = events_.Next<AttemptPrepared>();
  EXPECT_EQ(prepared.cause, v1::CAUSE_USER_ERROR);
  EXPECT_THAT(prepared.status, StatusIs(absl::StatusCode::kNotFound, HasSubstr("/nonexistent")));
}

TEST_F(ProcessTest, SecretsAreInTheEnvironmentOfTheRank_AndInNoFileOfTheDaemon) {
  const std::string secrets = directory_ + "-secrets";
  std::filesystem::create_directory(secrets);
  ASSERT_OK(PosixFileSystem()->WriteAtomically(secrets + "/token", "v4lu3-0f-t0k3n"));
  ASSERT_EQ(::chmod((secrets + "/token").c_str(), 0400), 0);
  files_.secrets_directory = secrets;
  NewHost();
  Script("[ \"$TOKEN\" = v4lu3-0f-t0k3n ] && echo it is there");
  v1::RankAssignment assignment = Assignment();
  (*assignment.mutable_spec()->mutable_env())["TOKEN"] = "${secret:token}";
  host_->Carry(PrepareAttempt{kRank.attempt, {assignment}});
  EXPECT_OK(events_.Next<AttemptPrepared>().status);
  host_->Carry(StartRank{kRank, assignment});
  EXPECT_EQ(events_.NextExit().exit.code(), 0);
  EXPECT_EQ(Log(), "it is there\n");
  for (const auto& entry : std::filesystem::recursive_directory_iterator(directory_)) {
    if (!entry.is_regular_file()) continue;
    const absl::StatusOr<std::string> text = PosixFileSystem()->Read(entry.path().string());
    ASSERT_OK(text.status());
    EXPECT_EQ(text->find("v4lu3"), std::string::npos) << entry.path();
  }
  std::filesystem::remove_all(secrets);
  host_->Carry(PrepareAttempt{kRank.attempt, {assignment}});
  const AttemptPrepared gone = events_.Next<AttemptPrepared>();
  EXPECT_EQ(gone.cause, v1::CAUSE_USER_ERROR);
  EXPECT_THAT(gone.status, StatusIs(absl::StatusCode::kNotFound, HasSubstr("worker w0")));
}

TEST_F(ProcessTest, WorkingDirectoryOutsideTheAllowedOnes_IsTheUsersError) {
  files_.allowed_paths = {directory_};
  NewHost();
  v1::RankAssignment assignment = Assignment();
  assignment.mutable_spec()->set_working_directory("/usr");
  host_->Carry(PrepareAttempt{kRank.attempt, {assignment}});
  const AttemptPrepared prepared = events_.Next<AttemptPrepared>();
  EXPECT_EQ(prepared.cause, v1::CAUSE_USER_ERROR);
  EXPECT_THAT(prepared.status,
              StatusIs(absl::StatusCode::kPermissionDenied, HasSubstr("--allow-path")));
}

TEST_F(ProcessTest, Output_LongerThanTheFiles_KeepsTheNewestUnderTheirOffsets) {
  Script("i=0; while [ $i -lt 1000 ]; do echo line $((100000 + i)); i=$((i+1)); done");
  Run();
  events_.NextExit();
  const std::string log = RunDirectory() + kLogDirectory;
  constexpr int64_t kLineBytes = 12;
  constexpr int64_t kTotal = 1000 * kLineBytes;
  ASSERT_OK_AND_ASSIGN(const LogChunk first, ReadLog(log, 0, 1 << 20));
  EXPECT_GT(first.offset, 0);
  EXPECT_EQ(first.offset + static_cast<int64_t>(first.data.size()), kTotal);
  EXPECT_LE(first.data.size(), 3000u);
  EXPECT_TRUE(first.end);
  ASSERT_OK_AND_ASSIGN(const LogChunk tail, ReadLog(log, -kLineBytes, 1 << 20));
  EXPECT_EQ(tail.data, "line 100999\n");
  ASSERT_OK_AND_ASSIGN(const LogChunk middle, ReadLog(log, 990 * kLineBytes, kLineBytes));
  EXPECT_EQ(middle.data, "line 100990\n");
  EXPECT_EQ(middle.offset, 990 * kLineBytes);
  EXPECT_FALSE(middle.end);
  ASSERT_OK_AND_ASSIGN(const LogChunk beyond, ReadLog(log, kTotal + 5, 100));
  EXPECT_EQ(beyond.offset, kTotal);
  EXPECT_EQ(beyond.data, "");
}

TEST_F(ProcessTest, LogWriter_Reopened_GoesOnAtItsOffset) {
  const std::string log = directory_ + "/log";
  {
    ASSERT_OK_AND_ASSIGN(LogWriter writer, LogWriter::Open(log, {.bytes_max = 10, .files_max = 9}));
    ASSERT_THAT(writer.Append("0123456789abc", absl::FromUnixSeconds(100)), IsOk());
  }
  ASSERT_OK_AND_ASSIGN(LogWriter writer, LogWriter::Open(log, {.bytes_max = 10, .files_max = 9}));
  EXPECT_EQ(writer.offset(), 13);
  ASSERT_THAT(writer.Append("defghijklm", absl::FromUnixSeconds(200)), IsOk());
  ASSERT_OK_AND_ASSIGN(const LogChunk chunk, ReadLog(log, 5, 12));
  EXPECT_EQ(chunk.data, "56789abcdefg");
  EXPECT_THAT(ReadLog(directory_ + "/none", 0, 1).status(), StatusIs(absl::StatusCode::kNotFound));
}

TEST_F(ProcessTest, LogOfWhatPrintsNothing_IsEmptyAndTakesNoFile) {
  const std::string log = directory_ + "/silent";
  ASSERT_OK_AND_ASSIGN(LogWriter writer, LogWriter::Open(log, {}));
  ASSERT_OK_AND_ASSIGN(const LogChunk chunk, ReadLog(log, 0, 100));
  EXPECT_EQ(chunk.data, "");
  EXPECT_TRUE(chunk.end);
  EXPECT_THAT(PosixFileSystem()->List(log).value(), IsEmpty());
  ASSERT_OK(writer.Append("late", absl::UnixEpoch()));
  ASSERT_OK_AND_ASSIGN(const LogChunk later, ReadLog(log, 0, 100));
  EXPECT_EQ(later.data, "late");
}

TEST_F(ProcessTest, LogFiles_TellWhenTheirBytesCame) {
  const std::string log = directory_ + "/log";
  ASSERT_OK_AND_ASSIGN(LogWriter writer, LogWriter::Open(log, {.bytes_max = 10, .files_max = 2}));
  const absl::Time start = absl::FromUnixSeconds(100);
  ASSERT_THAT(writer.Append("0123", start), IsOk());
  ASSERT_THAT(writer.Append("45", start + absl::Milliseconds(50)), IsOk());  // of the same mark
  ASSERT_THAT(writer.Append("6789abc", start + absl::Seconds(1)), IsOk());   // in two files
  const auto marks = [&log](int64_t begin, int64_t end) {
    std::vector<std::pair<int64_t, int64_t>> found;
    for (const LogTime& mark : ReadLogTimes(log, begin, end)) {
      found.emplace_back(mark.offset, absl::ToUnixMillis(mark.time));
    }
    return found;
  };
  EXPECT_THAT(marks(0, 13), ElementsAre(Pair(0, 100'000), Pair(6, 101'000), Pair(10, 101'000)));
  EXPECT_THAT(marks(5, 8), ElementsAre(Pair(0, 100'000), Pair(6, 101'000)));
  EXPECT_EQ(LogOffsetAt(log, start), 0);
  EXPECT_EQ(LogOffsetAt(log, start + absl::Milliseconds(500)), 6);
  EXPECT_EQ(LogOffsetAt(log, start + absl::Seconds(5)), 13);
  // What is removed takes its marks along; a clock that was set back is no reason to stop.
  ASSERT_THAT(writer.Append("0123456789", start), IsOk());
  EXPECT_THAT(marks(0, 30), ElementsAre(Pair(10, 101'000), Pair(13, 100'000), Pair(20, 100'000)));
  // A log of an earlier version has none.
  std::filesystem::remove_all(log + ".times");
  EXPECT_THAT(marks(0, 30), IsEmpty());
  EXPECT_EQ(LogOffsetAt(log, start), 0);
}

TEST_F(ProcessTest, OldRunDirectories_ArePrunedButNeverHeldOnes) {
  for (int epoch = 1; epoch <= 25; ++epoch) {
    const std::string path =
        absl::StrCat(directory_, "/", DirectoryName({JobId("old"), Epoch(epoch)}));
    ASSERT_TRUE(std::filesystem::create_directory(path));
    std::filesystem::last_write_time(
        path, std::filesystem::file_time_type(std::chrono::seconds(1000 + epoch)));
  }
  prune_after_ = absl::ZeroDuration();
  NewHost();
  host_->Prune({"old.e1"});
  const auto gone = [this] { return !std::filesystem::exists(directory_ + "/old.e5"); };
  for (int looks = 0; looks < 10'000 && !gone(); ++looks) {
    host_->Carry(AttachRank{kRank});  // its answer comes after what the host has to do now
    events_.Next<RankNotStarted>();
  }
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/old.e1"));
  EXPECT_FALSE(std::filesystem::exists(directory_ + "/old.e5"));
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/old.e6"));
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/old.e25"));
}

TEST_F(ProcessTest, OldRunDirectories_AreLeftAloneWhileAttemptsEnd) {
  for (int epoch = 1; epoch <= 25; ++epoch) {
    ASSERT_TRUE(std::filesystem::create_directory(absl::StrCat(directory_, "/old.e", epoch)));
  }
  host_->Prune({});
  host_->Prune({});
  host_->Carry(AttachRank{kRank});
  events_.Next<RankNotStarted>();
  EXPECT_TRUE(std::filesystem::exists(directory_ + "/old.e5"));
}

TEST(ProcTest, OpenProcess_WithAnotherStartTime_FindsNothing) {
  const std::optional<ProcessStat> self = ReadProcessStat(::getpid());
  ASSERT_TRUE(self.has_value());
  EXPECT_TRUE(OpenProcess(::getpid(), self->start_time).valid());
  EXPECT_FALSE(OpenProcess(::getpid(), self->start_time + 1).valid());
}

// `muster-worker supervise`, whose child has no coordinator, and what the two print.
class Supervised {
 public:
  explicit Supervised(const std::vector<std::string>& flags) {
    int out[2];
    EXPECT_EQ(::pipe2(out, O_CLOEXEC), 0);
    std::vector<std::string> words = {MUSTER_WORKER_BINARY, "supervise"};
    words.insert(words.end(), flags.begin(), flags.end());
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(out[1], STDOUT_FILENO);
      ::execv(argv[0], argv.data());
      ::_exit(127);
    }
    ::close(out[1]);
    out_ = ::fdopen(out[0], "r");
  }
  ~Supervised() {
    ::kill(pid_, SIGKILL);
    ::fclose(out_);
  }
  // The pid in the line that a daemon prints once it serves.
  pid_t NextDaemon() {
    char line[4096] = "";
    if (::fgets(line, sizeof(line), out_) == nullptr) return -1;
    const std::string text = line;
    const size_t at = text.find("\"pid\":");
    return at == std::string::npos ? -1 : std::atoi(text.c_str() + at + 6);
  }
  int Wait() {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    return status;
  }
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_;
  FILE* out_;
};

TEST_F(ProcessTest, Supervisor_StartsADaemonThatWasKilledAgain_AndEndsWithIt) {
#ifdef __SANITIZE_THREAD__
  GTEST_SKIP() << "the daemon ends at what gRPC and Abseil, built without it, hide of their locks";
#endif
  Supervised supervised({"--coordinator", "127.0.0.1:1", "--state-dir", directory_ + "/state",
                         "--gpus", "none", "--name", "w"});
  const pid_t first = supervised.NextDaemon();
  ASSERT_GT(first, 0);
  EXPECT_NE(first, supervised.pid());
  ASSERT_EQ(::kill(first, SIGKILL), 0);
  const pid_t second = supervised.NextDaemon();
  ASSERT_GT(second, 0);
  EXPECT_NE(second, first);
  ASSERT_EQ(::kill(supervised.pid(), SIGTERM), 0);
  const int status = supervised.Wait();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(ReadProcessStat(second).has_value());
}

TEST_F(ProcessTest, SupervisorOfWrongUsage_EndsWithIt) {
  Supervised supervised({"--no-such-flag"});
  const int status = supervised.Wait();
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 2);
}

}  // namespace
}  // namespace muster::worker
