#include "cli/local.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "cli/process.h"

namespace muster::cli {
namespace {

constexpr int kWorkersDefault = 2;
constexpr int kSlotsDefault = 2;
constexpr absl::Duration kReadyTimeout = absl::Seconds(60);
constexpr absl::Duration kStopGrace = absl::Seconds(15);
constexpr absl::Duration kRankGrace = absl::Seconds(5);

struct Member {
  std::string name;
  ProcessIdentity process;
  std::string address;  // the coordinator's
  std::string metrics;
  std::string directory;
  std::string log;
  int slots = 0;  // workers

  bool alive() const { return IsAlive(process); }
};

struct State {
  Member coordinator;
  std::vector<Member> workers;
};

Json ToJson(const Member& member) {
  Json object = {{"name", member.name}, {"pid", member.process.pid}, {"alive", member.alive()}};
  if (!member.address.empty()) object["address"] = member.address;
  object["metrics"] = member.metrics;
  object["stateDir"] = member.directory;
  object["log"] = member.log;
  if (member.slots > 0) object["slots"] = member.slots;
  object["startTime"] = member.process.start_time;
  return object;
}

// The text under `key`; empty when there is none.
std::string TextOf(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_string() ? found->get<std::string>() : "";
}

// The number under `key`; 0 when there is none.
int64_t NumberOf(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found != object.end() && found->is_number_integer() ? found->get<int64_t>() : 0;
}

// Absent when `object` is no member that ToJson has written.
std::optional<Member> MemberFrom(const Json& object) {
  if (!object.is_object()) return std::nullopt;
  Member member;
  member.name = TextOf(object, "name");
  member.process = {NumberOf(object, "pid"), static_cast<uint64_t>(NumberOf(object, "startTime"))};
  member.address = TextOf(object, "address");
  member.metrics = TextOf(object, "metrics");
  member.directory = TextOf(object, "stateDir");
  member.log = TextOf(object, "log");
  member.slots = static_cast<int>(NumberOf(object, "slots"));
  if (!object.contains("pid") || !object.contains("startTime")) return std::nullopt;
  return member;
}

Json ToJson(const State& state, const std::string& home) {
  Json object = {{"home", home}, {"coordinator", ToJson(state.coordinator)}};
  object["workers"] = Json::array();
  for (const Member& worker : state.workers) object["workers"].push_back(ToJson(worker));
  return object;
}

// Absent when `object` is no state that ToJson has written.
std::optional<State> StateFrom(const Json& object) {
  if (!object.is_object() || !object.contains("coordinator") || !object.contains("workers") ||
      !object["workers"].is_array()) {
    return std::nullopt;
  }
  std::optional<Member> coordinator = MemberFrom(object["coordinator"]);
  if (!coordinator.has_value()) return std::nullopt;
  State state = {.coordinator = *std::move(coordinator), .workers = {}};
  for (const Json& entry : object["workers"]) {
    std::optional<Member> worker = MemberFrom(entry);
    if (!worker.has_value()) return std::nullopt;
    state.workers.push_back(*std::move(worker));
  }
  return state;
}

// The last lines of a log, for an error message.
std::string Tail(const std::string& path) {
  constexpr std::streamoff kBytes = 1000;
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file.tellg();
  if (size <= 0) return "";
  file.seekg(std::max<std::streamoff>(0, size - kBytes));
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  return absl::StrCat("\n", text);
}

// The cluster below one home directory. Holds its lock from Open to the destructor.
class LocalCluster {
 public:
  explicit LocalCluster(const LocalOptions& options)
      : options_(options), root_(options.home + "/local"), files_(PosixFileSystem()) {}
  ~LocalCluster() {
    if (lock_ >= 0) ::close(lock_);
  }
  LocalCluster(const LocalCluster&) = delete;
  LocalCluster& operator=(const LocalCluster&) = delete;

  // Waits for the lock, then reads the state.
  absl::Status Open() {
    const std::string path = root_ + "/lock";
    struct stat held = {}, named = {};
    // Repeated when `local down --purge` removed the file while this waited for its lock.
    do {
      if (lock_ >= 0) ::close(lock_);
      RETURN_IF_ERROR(files_->MakeDirectory(root_ + "/logs"));
      lock_ = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644);
      if (lock_ < 0) {
        return absl::PermissionDeniedError(absl::StrCat(path, ": ", std::strerror(errno)));
      }
      while (::flock(lock_, LOCK_EX) != 0) {
        if (errno == EINTR) continue;
        return absl::UnavailableError(absl::StrCat(path, ": ", std::strerror(errno)));
      }
    } while (::fstat(lock_, &held) != 0 || ::stat(path.c_str(), &named) != 0 ||
             held.st_ino != named.st_ino);
    const absl::Status read = Read();
    return read.code() == absl::StatusCode::kNotFound ? absl::OkStatus() : read;
  }

  // Reads the state that was last written; does not need the lock.
  absl::Status Read() {
    const std::string path = root_ + "/state.json";
    ASSIGN_OR_RETURN(const std::string text, files_->Read(path));
    std::optional<State> state = StateFrom(Json::parse(text, nullptr, /*allow_exceptions=*/false));
    if (!state.has_value()) {
      return absl::DataLossError(absl::StrCat(
          path, " is damaged; end muster-coordinator and muster-worker, then remove the file"));
    }
    state_ = *std::move(state);
    return absl::OkStatus();
  }

  absl::Status Up() {
    std::vector<ProcessIdentity> started;
    absl::Cleanup undo = [&] { EndProcesses(started, kRankGrace); };
    RETURN_IF_ERROR(DropExtraWorkers());
    Member& coordinator = state_.coordinator;
    if (!coordinator.alive()) {
      coordinator.name = "coordinator";
      coordinator.directory = root_ + "/coordinator";
      RETURN_IF_ERROR(Start(coordinator,
                            {options_.binaries + "/muster-coordinator", "--listen", "127.0.0.1:0",
                             "--metrics", "127.0.0.1:0", "--data-dir", coordinator.directory},
                            started));
    }
    const int wanted = options_.workers > 0     ? options_.workers
                       : state_.workers.empty() ? kWorkersDefault
                                                : static_cast<int>(state_.workers.size());
    const int slots_before = state_.workers.empty() ? kSlotsDefault : state_.workers[0].slots;
    for (int i = 0; i < wanted; ++i) {
      if (i == static_cast<int>(state_.workers.size())) state_.workers.emplace_back();
      Member& worker = state_.workers[i];
      if (worker.alive()) continue;
      worker.name = absl::StrCat("worker-", i + 1);
      worker.directory = absl::StrCat(root_, "/", worker.name);
      const int before = worker.slots > 0 ? worker.slots : slots_before;
      worker.slots = options_.slots > 0 ? options_.slots : before;
      RETURN_IF_ERROR(
          Start(worker,
                {options_.binaries + "/muster-worker", "--coordinator",
                 absl::StrCat("file:", root_, "/coordinator/address"), "--name", worker.name,
                 "--state-dir", worker.directory, "--slots", absl::StrCat(worker.slots), "--gpus",
                 i == 0 ? "all" : "none", "--metrics", "127.0.0.1:0"},
                started));
    }
    std::move(undo).Cancel();
    return absl::OkStatus();
  }

  absl::Status Down(bool purge) {
    std::vector<ProcessIdentity> daemons;
    for (const Member& worker : state_.workers) daemons.push_back(worker.process);
    if (state_.coordinator.process.pid != 0) daemons.push_back(state_.coordinator.process);
    EndProcesses(daemons, kStopGrace);
    // Ranks outlive their daemon by design. They are ended when no daemon is left to start others.
    EndProcesses(ProcessesOf(root_), kRankGrace);
    if (!ProcessesOf(root_).empty()) {
      return absl::InternalError(absl::StrCat("processes below ", root_, " could not be ended"));
    }
    return purge ? files_->RemoveTree(root_) : absl::OkStatus();
  }

  const State& state() const { return state_; }

 private:
  absl::Status Write() {
    return files_->WriteAtomically(root_ + "/state.json",
                                   ToJson(state_, options_.home).dump(2) + "\n");
  }

  // Ends the last workers when `--workers` is lower than before.
  absl::Status DropExtraWorkers() {
    if (options_.workers <= 0) return absl::OkStatus();
    std::vector<ProcessIdentity> extra;
    std::vector<std::string> directories;
    while (static_cast<int>(state_.workers.size()) > options_.workers) {
      extra.push_back(state_.workers.back().process);
      directories.push_back(state_.workers.back().directory);
      state_.workers.pop_back();
    }
    EndProcesses(extra, kStopGrace);
    for (const std::string& directory : directories) {
      EndProcesses(ProcessesOf(directory), kRankGrace);
    }
    return extra.empty() ? absl::OkStatus() : Write();
  }

  absl::Status Start(Member& member, const std::vector<std::string>& command,
                     std::vector<ProcessIdentity>& started) {
    member.log = absl::StrCat(root_, "/logs/", member.name, ".log");
    ASSIGN_OR_RETURN(DetachedProcess process, StartDetached(command, member.log));
    member.process = process.identity;
    started.push_back(process.identity);
    // Written before the wait, so that `local down` knows the process if this command is killed.
    RETURN_IF_ERROR(Write());
    const absl::StatusOr<std::string> line = WaitForLine(process, kReadyTimeout);
    if (!line.ok()) {
      return absl::UnavailableError(
          absl::StrCat(member.name, " did not start: ", line.status().message(), "; the end of ",
                       member.log, ":", Tail(member.log)));
    }
    const Json ready = Json::parse(*line, nullptr, /*allow_exceptions=*/false);
    if (!ready.is_object()) {
      return absl::UnavailableError(
          absl::StrCat(member.name, " printed something else than its addresses: ", *line));
    }
    member.address = TextOf(ready, "address");
    member.metrics = TextOf(ready, "metrics");
    return Write();
  }

  const LocalOptions options_;
  const std::string root_;
  const std::unique_ptr<FileSystem> files_;
  int lock_ = -1;
  State state_;
};

void Show(const LocalCluster& cluster, const std::string& home, Format format, Terminal& terminal) {
  const State& state = cluster.state();
  if (format != Format::kTable) {
    Print(ToJson(state, home), format, terminal.out);
    return;
  }
  std::vector<std::vector<std::string>> rows = {
      {"NAME", "STATE", "PID", "ADDRESS", "METRICS", "SLOTS", "LOG"}};
  const auto add = [&](const Member& member) {
    rows.push_back(
        {member.name, member.alive() ? Coloured("running", terminal) : Coloured("dead", terminal),
         absl::StrCat(member.process.pid), member.address.empty() ? "-" : member.address,
         member.metrics, member.slots > 0 ? absl::StrCat(member.slots) : "-", member.log});
  };
  add(state.coordinator);
  for (const Member& worker : state.workers) add(worker);
  terminal.out << Table(rows);
}

}  // namespace

absl::Status LocalUp(const LocalOptions& options, Format format, Terminal& terminal) {
  LocalCluster cluster(options);
  RETURN_IF_ERROR(cluster.Open());
  RETURN_IF_ERROR(cluster.Up());
  Show(cluster, options.home, format, terminal);
  return absl::OkStatus();
}

absl::Status LocalDown(const LocalOptions& options, bool purge, Terminal& terminal) {
  if (!std::filesystem::exists(options.home + "/local")) {
    terminal.out << "no local cluster in " << options.home << "\n";
    return absl::OkStatus();
  }
  LocalCluster cluster(options);
  RETURN_IF_ERROR(cluster.Open());
  RETURN_IF_ERROR(cluster.Down(purge));
  terminal.out << "local cluster stopped; "
               << (purge ? "its state was removed" : "its state stays in ")
               << (purge ? "" : options.home + "/local") << "\n";
  return absl::OkStatus();
}

absl::Status LocalStatus(const LocalOptions& options, Format format, Terminal& terminal) {
  LocalCluster cluster(options);
  const absl::Status read = cluster.Read();
  if (read.code() == absl::StatusCode::kNotFound) {
    return absl::NotFoundError(
        absl::StrCat("no local cluster in ", options.home, "; `muster local up` starts one"));
  }
  RETURN_IF_ERROR(read);
  Show(cluster, options.home, format, terminal);
  return absl::OkStatus();
}

}  // namespace muster::cli
