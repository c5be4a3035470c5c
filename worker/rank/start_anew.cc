#include "worker/rank/start_anew.h"

#include <linux/close_range.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace muster::worker {
namespace {

// The strings of a file of /proc that ends each with a zero byte, and a null pointer behind them.
class Strings {
 public:
  explicit Strings(const char* path) {
    std::ifstream file(path, std::ios::binary);
    bytes_.assign(std::istreambuf_iterator<char>(file), {});
    for (size_t at = 0; at < bytes_.size(); at += std::strlen(&bytes_[at]) + 1) {
      pointers_.push_back(&bytes_[at]);
    }
    pointers_.push_back(nullptr);
  }
  char** get() { return pointers_.data(); }

 private:
  std::string bytes_;
  std::vector<char*> pointers_;
};

// Whose names are used to open them once, while communicators are made: NCCL's, and those of
// parallel/comm/peer_counters.cc.
bool IsOfCommunicator(absl::string_view path) {
  return absl::StartsWith(path, "/dev/shm/nccl-") || absl::StartsWith(path, "/dev/shm/muster-");
}

}  // namespace

void UnlinkSharedMemory() {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t begin = line.find('/');
    if (begin == std::string::npos) continue;
    const std::string path = line.substr(begin);
    // What has no name any more is shown as "PATH (deleted)", which no file is called.
    if (IsOfCommunicator(path)) ::unlink(path.c_str());
  }
}

absl::Status StartAnew() {
  Strings arguments("/proc/self/cmdline");
  // What libraries have added to the environment since is theirs to add again.
  Strings environment("/proc/self/environ");
  if (arguments.get()[0] == nullptr) {
    return absl::InternalError("cannot start anew: /proc/self/cmdline cannot be read");
  }
  UnlinkSharedMemory();
  // Libraries open descriptors without it.
  (void)::syscall(SYS_close_range, STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  ::execve(arguments.get()[0], arguments.get(), environment.get());
  return absl::InternalError(
      absl::StrCat("cannot start ", arguments.get()[0], " anew: ", std::strerror(errno)));
}

}  // namespace muster::worker
