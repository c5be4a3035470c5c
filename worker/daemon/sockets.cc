#include "worker/daemon/sockets.h"

#include <filesystem>
#include <string>
#include <system_error>

#include "absl/algorithm/container.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/proc.h"

namespace muster::worker {
namespace {

namespace fs = std::filesystem;

// The rows of /proc/net/tcp and tcp6: "sl local_address rem_address st ... uid timeout inode".
constexpr size_t kLocal = 1, kState = 3, kInode = 9;
constexpr absl::string_view kListening = "0A";

void AddListening(const std::string& path, ListeningSockets& sockets) {
  const std::string text = ReadKernelFile(path);
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<absl::string_view> fields = absl::StrSplit(line, ' ', absl::SkipEmpty());
    if (fields.size() <= kInode || fields[kState] != kListening) continue;
    const std::vector<absl::string_view> address = absl::StrSplit(fields[kLocal], ':');
    uint64_t inode = 0;
    int port = 0;
    if (address.size() == 2 && absl::SimpleHexAtoi(address[1], &port) &&
        absl::SimpleAtoi(fields[kInode], &inode) && inode != 0) {
      sockets.emplace(inode, port);
    }
  }
}

// The inodes of the sockets among the process's descriptors.
std::set<uint64_t> SocketsOf(pid_t pid) {
  std::set<uint64_t> inodes;
  std::error_code error;
  for (fs::directory_iterator it(absl::StrCat("/proc/", pid, "/fd"), error), end;
       !error && it != end; it.increment(error)) {
    std::error_code gone;
    const std::string target = fs::read_symlink(it->path(), gone).string();
    uint64_t inode = 0;
    if (!gone && absl::StartsWith(target, "socket:[") &&
        absl::SimpleAtoi(target.substr(8, target.size() - 9), &inode)) {
      inodes.insert(inode);
    }
  }
  return inodes;
}

}  // namespace

ListeningSockets AllListeningSockets() {
  ListeningSockets sockets;
  AddListening("/proc/self/net/tcp", sockets);
  AddListening("/proc/self/net/tcp6", sockets);
  return sockets;
}

ListeningSockets ListeningSocketsOf(pid_t pid) {
  ListeningSockets listening = AllListeningSockets();
  const std::set<uint64_t> held = SocketsOf(pid);
  std::erase_if(listening, [&held](const auto& socket) { return !held.contains(socket.first); });
  return listening;
}

std::vector<pid_t> HoldersOf(const std::set<uint64_t>& inodes) {
  std::vector<pid_t> holders;
  for (const pid_t pid : AllProcesses()) {
    if (absl::c_any_of(SocketsOf(pid),
                       [&inodes](uint64_t inode) { return inodes.contains(inode); })) {
      holders.push_back(pid);
    }
  }
  return holders;
}

}  // namespace muster::worker
