// Processes of this machine: descriptors that watch them, and the search for what a rank started.
#ifndef MUSTER_WORKER_DAEMON_PROC_H_
#define MUSTER_WORKER_DAEMON_PROC_H_

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace muster::worker {

// Owns a file descriptor; -1 = none.
class UniqueFd {
 public:
  explicit UniqueFd(int fd = -1) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.Release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    Reset(other.Release());
    return *this;
  }
  ~UniqueFd() { Reset(); }
  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() {
    const int fd = fd_;
    fd_ = -1;
    return fd;
  }
  void Reset(int fd = -1);

 private:
  int fd_;
};

// A descriptor that becomes readable when the process ends. Invalid when it has ended, or when the
// number now names another process (its start time differs).
UniqueFd OpenProcess(pid_t pid, uint64_t start_time);
bool HasEnded(const UniqueFd& pidfd);

// Running processes whose session is `session` (when > 0) or whose environment has NAME=`value`. A
// process may leave the session, but a child inherits at least the environment.
// `user`: of this user alone.
std::vector<pid_t> FindProcesses(pid_t session, const std::string& name, const std::string& value,
                                 std::optional<uid_t> user = std::nullopt);
// As whom the process runs; no value when it has ended.
std::optional<uid_t> UserOf(pid_t pid);

// How many processes of this process's cgroup the kernel's out-of-memory killer has killed; 0 when
// that is not known.
int64_t OutOfMemoryKills();

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_PROC_H_
