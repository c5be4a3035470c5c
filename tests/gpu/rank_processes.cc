#include "tests/gpu/rank_processes.h"

#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <mutex>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "base/file_system.h"
#include "base/status_macros.h"

namespace muster::testing {
namespace {

using parallel::Communicator;

constexpr int kHung = 3;  // exit code
// How long ranks that hang may take to write their records, before they are killed.
constexpr absl::Duration kLastWords = absl::Seconds(3);

// A key-value store of files in one directory, each renamed into place when it is whole.
class FileStore : public parallel::KeyValueStore {
 public:
  FileStore(std::string directory, std::string prefix)
      : directory_(std::move(directory)), prefix_(std::move(prefix)) {}
  absl::Status Put(const std::string& key, const std::string& value) override {
    return files_->WriteAtomically(PathOf(key), value);
  }
  absl::StatusOr<std::string> Get(const std::string& key, absl::Duration timeout) override {
    const absl::Time deadline = absl::Now() + timeout;
    for (;;) {
      absl::StatusOr<std::string> value = files_->Read(PathOf(key));
      if (value.ok()) return value;
      if (absl::Now() > deadline) return absl::DeadlineExceededError(key);
      poll(nullptr, 0, /*milliseconds=*/2);  // files can only be polled for
    }
  }

 private:
  std::string PathOf(const std::string& key) const {
    return absl::StrCat(directory_, "/", prefix_, absl::StrReplaceAll(key, {{"/", "-"}}));
  }
  const std::unique_ptr<FileSystem> files_ = PosixFileSystem();
  const std::string directory_, prefix_;
};

bool WriteAll(int socket, const void* data, size_t size) {
  const char* at = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = send(socket, at, size, MSG_NOSIGNAL);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    at += written;
    size -= static_cast<size_t>(written);
  }
  return true;
}

bool ReadAll(int socket, void* data, size_t size) {
  char* at = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t got = recv(socket, at, size, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    at += got;
    size -= static_cast<size_t>(got);
  }
  return true;
}

struct Order {
  int32_t index = 0;
  double bound_seconds = 0;
};
struct Answer {
  int32_t code = 0;
  uint64_t size = 0;
};

absl::Status Receive(int socket, std::string& text) {
  Answer answer;
  bool heard = ReadAll(socket, &answer, sizeof(answer));
  if (heard) {
    text.resize(answer.size);
    heard = ReadAll(socket, text.data(), text.size());
  }
  if (!heard) return absl::DeadlineExceededError("its process has ended without an answer");
  return absl::Status(static_cast<absl::StatusCode>(answer.code), text);
}

// Ends this process when its work takes too long.
class Bound {
 public:
  Bound(const RankProcess& self, const Order& order)
      : thread_([this, &self, order] {
          std::unique_lock<std::mutex> lock(mutex_);
          const auto limit = std::chrono::duration<double>(order.bound_seconds);
          if (done_.wait_for(lock, limit, [this] { return ended_; })) return;
          const std::string text = absl::StrCat(
              "rank ", self.rank(), ": work ", order.index, " has not ended after ",
              order.bound_seconds, " s. Unfinished: ", self.recorder().Unfinished(), "\n");
          std::fputs(text.c_str(), stderr);
          const std::string dump = self.recorder().Dump();
          constexpr size_t kShown = 2500;
          const size_t from = dump.size() > kShown ? dump.size() - kShown : 0;
          std::fprintf(stderr, "rank %d, newest calls:\n%s\n", self.rank(), dump.c_str() + from);
          std::fflush(stderr);
          _exit(kHung);
        }) {}
  ~Bound() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ended_ = true;
    }
    done_.notify_all();
    thread_.join();
  }

 private:
  std::mutex mutex_;
  std::condition_variable done_;
  bool ended_ = false;
  std::thread thread_;
};

}  // namespace

RankProcess::RankProcess(int rank, kernels::DeviceKind kind, std::string directory)
    : rank_(rank),
      kind_(kind),
      directory_(std::move(directory)),
      recorder_(std::make_shared<parallel::FlightRecorder>()) {}

absl::StatusOr<Communicator*> RankProcess::World(int ranks, int thread_blocks_max) {
  std::unique_ptr<Communicator>& world = worlds_[{ranks, thread_blocks_max}];
  if (world != nullptr) return world.get();
  FileStore store(directory_, absl::StrCat("w", ranks, "-", thread_blocks_max, "-"));
  if (ranks == 1) {
    world = std::move(parallel::MakeLocalCommunicators(1, absl::Minutes(1))[0]);
  } else if (kind_ == kernels::DeviceKind::kCuda) {
    if (device_ == nullptr) {
      ASSIGN_OR_RETURN(device_, kernels::MakeCudaDevice(rank_));
    }
    parallel::NcclOptions options;
    options.connect_timeout = absl::Minutes(1);
    options.thread_blocks_max = thread_blocks_max;
    options.on_failure = [recorder = recorder_](const absl::Status&) { recorder->Freeze(); };
    // Which transport a group takes explains many a step time.
    if (rank_ == 0 && std::getenv("MUSTER_TEST_TRANSPORTS") != nullptr) {
      options.on_transports = [](const std::string& what) { std::cerr << what << std::endl; };
    }
    ASSIGN_OR_RETURN(world, MakeNcclCommunicator(store, rank_, ranks, *device_, options));
  } else {
    ASSIGN_OR_RETURN(world, MakeTcpCommunicator(store, rank_, ranks, parallel::TcpOptions()));
  }
  world = parallel::FlightRecorder::Record(std::move(world), recorder_);
  return world.get();
}

absl::StatusOr<std::shared_ptr<parallel::MeshGroups>> RankProcess::Groups(
    const parallel::Mesh& mesh, int zero_shards, int thread_blocks_max, bool keep) {
  const std::string key =
      absl::StrCat(mesh.degrees().ToString(), " ", zero_shards, " ", thread_blocks_max);
  if (const auto found = groups_.find(key); found != groups_.end()) return found->second;
  ASSIGN_OR_RETURN(Communicator* const world, World(mesh.world_size(), thread_blocks_max));
  ASSIGN_OR_RETURN(auto made, parallel::MeshGroups::Make(mesh, *world, zero_shards));
  std::shared_ptr<parallel::MeshGroups> groups = std::move(made);
  if (keep) groups_[key] = groups;
  return groups;
}

RankProcesses::RankProcesses(int ranks, kernels::DeviceKind kind, std::string directory, Work work)
    : ranks_(ranks), kind_(kind), directory_(std::move(directory)), work_(std::move(work)) {}

RankProcesses::~RankProcesses() { Stop(); }

absl::Status RankProcesses::Start() {
  RETURN_IF_ERROR(
      PosixFileSystem()->MakeDirectory(absl::StrCat(directory_, "/rendezvous-", ++generation_)));
  std::fflush(stdout);
  std::fflush(stderr);
  for (int rank = 0; rank < ranks_; ++rank) {
    int pair[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0) {
      return absl::InternalError(absl::StrCat("socketpair: ", std::strerror(errno)));
    }
    const pid_t pid = fork();
    if (pid < 0) return absl::InternalError(absl::StrCat("fork: ", std::strerror(errno)));
    if (pid == 0) {
      close(pair[0]);
      for (const Child& child : children_) close(child.socket);
      Serve(rank, pair[1]);
    }
    close(pair[1]);
    children_.push_back({pid, pair[0]});
  }
  return absl::OkStatus();
}

void RankProcesses::Stop() {
  for (const Child& child : children_) {
    kill(child.pid, SIGKILL);
    waitpid(child.pid, nullptr, 0);
    close(child.socket);
  }
  children_.clear();
}

void RankProcesses::Serve(int rank, int socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  parallel::SetNcclEnvironment({});
  RankProcess self(rank, kind_, absl::StrCat(directory_, "/rendezvous-", generation_));
  Order order;
  while (ReadAll(socket, &order, sizeof(order))) {
    absl::StatusOr<std::string> result;
    {
      const Bound bound(self, order);
      result = work_(self, order.index);
    }
    const std::string text = result.ok() ? *result : std::string(result.status().message());
    const Answer answer = {static_cast<int32_t>(result.status().code()), text.size()};
    std::fflush(stdout);
    if (!WriteAll(socket, &answer, sizeof(answer)) || !WriteAll(socket, text.data(), text.size())) {
      break;
    }
  }
  // Without destructors, which take long in a process with a CUDA context.
  _exit(0);
}

absl::StatusOr<std::vector<std::string>> RankProcesses::Run(int index, int ranks,
                                                            absl::Duration bound) {
  if (children_.empty()) RETURN_IF_ERROR(Start());
  const Order order = {index, absl::ToDoubleSeconds(bound)};
  for (int rank = 0; rank < ranks; ++rank) {
    WriteAll(children_[rank].socket, &order, sizeof(order));
  }
  std::vector<std::string> texts(ranks);
  std::vector<bool> answered(ranks, false);
  absl::Status status;
  absl::Time deadline = absl::Now() + bound + kLastWords;
  for (;;) {
    std::vector<pollfd> waiting;
    std::vector<int> who;
    for (int rank = 0; rank < ranks; ++rank) {
      if (answered[rank]) continue;
      waiting.push_back({children_[rank].socket, POLLIN, 0});
      who.push_back(rank);
    }
    if (waiting.empty()) break;
    const int64_t left = std::max<int64_t>(0, absl::ToInt64Milliseconds(deadline - absl::Now()));
    if (poll(waiting.data(), waiting.size(), static_cast<int>(left)) <= 0) {
      status.Update(absl::DeadlineExceededError(absl::StrCat(
          who.size(), " ranks have not answered after ", absl::FormatDuration(bound))));
      break;
    }
    for (size_t i = 0; i < waiting.size(); ++i) {
      if (waiting[i].revents == 0) continue;
      answered[who[i]] = true;
      const absl::Status of_rank = Receive(waiting[i].fd, texts[who[i]]);
      if (of_rank.ok() || !status.ok()) continue;
      status = Annotate(of_rank, absl::StrCat("rank ", who[i]));
      deadline = std::min(deadline, absl::Now() + kLastWords);
    }
  }
  if (!status.ok()) {
    Stop();
    return status;
  }
  return texts;
}

}  // namespace muster::testing
