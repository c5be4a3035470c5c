#include "worker/daemon/shim_server.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

// The descriptor of the server's end of the socket.
constexpr int kServerSocket = 3;
constexpr uint32_t kRequestBytesMax = 64 << 20;
// A server that has not answered by then is killed; it only forks.
constexpr int kAnswerSeconds = 10;
// Room in the server's command line for those of its shims.
constexpr size_t kTitleBytes = 512;

// Both directions: a number, with at most one descriptor. A request goes on with so many bytes,
// each string with a zero behind it: how many arguments, the arguments, the environment. The answer
// is 0, with the pidfd of the shim unless it has ended, or an errno.
bool SendNumber(int socket, uint32_t number, int descriptor) {
  iovec data = {&number, sizeof(number)};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (descriptor >= 0) {
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(header), &descriptor, sizeof(int));
  }
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket, &message, MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == sizeof(number);
}

bool ReceiveNumber(int socket, uint32_t& number, UniqueFd& descriptor) {
  iovec data = {&number, sizeof(number)};
  msghdr message = {};
  message.msg_iov = &data;
  message.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  ssize_t got = 0;
  do {
    got = ::recvmsg(socket, &message, MSG_CMSG_CLOEXEC | MSG_WAITALL);
  } while (got < 0 && errno == EINTR);
  for (cmsghdr* header = CMSG_FIRSTHDR(&message); header != nullptr;
       header = CMSG_NXTHDR(&message, header)) {
    if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS) continue;
    int received = -1;
    std::memcpy(&received, CMSG_DATA(header), sizeof(int));
    descriptor.Reset(received);
  }
  return got == sizeof(number);
}

bool SendAll(int socket, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
  return true;
}

bool ReceiveAll(int socket, std::string& bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::recv(socket, bytes.data() + done, bytes.size() - done, MSG_WAITALL);
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) return false;
    done += static_cast<size_t>(got);
  }
  return true;
}

std::string Encode(const std::vector<std::string>& arguments,
                   const std::vector<std::string>& environment) {
  std::string bytes = absl::StrCat(arguments.size());
  bytes.push_back('\0');
  for (const std::vector<std::string>* list : {&arguments, &environment}) {
    for (const std::string& text : *list) bytes.append(text.c_str(), text.size() + 1);
  }
  return bytes;
}

bool Decode(const std::string& bytes, std::vector<std::string>& arguments,
            std::vector<std::string>& environment) {
  std::vector<std::string> all;
  for (size_t at = 0; at < bytes.size();) {
    all.emplace_back(bytes.c_str() + at);
    at += all.back().size() + 1;
  }
  size_t count = 0;
  if (all.empty() || !absl::SimpleAtoi(all[0], &count) || count >= all.size()) return false;
  const auto end = all.begin() + 1 + static_cast<std::ptrdiff_t>(count);
  arguments.assign(all.begin() + 1, end);
  environment.assign(end, all.end());
  return true;
}

// The memory of a process's command line.
struct Title {
  char* begin = nullptr;
  size_t size = 0;

  Title(int argc, char** argv) {
    if (argc < 1) return;
    begin = argv[0];
    char* const end = argv[argc - 1] + std::strlen(argv[argc - 1]);
    size = static_cast<size_t>(end - begin);
  }
  // As the kernel shows an argument list: each with a zero behind it.
  void Write(const std::vector<std::string>& arguments) const {
    std::string text = absl::StrJoin(arguments, absl::string_view("\0", 1));
    text.resize(size, '\0');
    std::copy(text.begin(), text.end(), begin);
  }
};

// In the forked process. Returns its exit status.
int BecomeShim(const std::string& bytes, int socket, const std::string& binary, const Title& title,
               const ProgramsInside& inside) {
  // For the life of the process: getenv gives pointers into them.
  static std::vector<std::string> environment;
  static std::vector<char*> pointers;
  std::vector<std::string> arguments;
  if (!Decode(bytes, arguments, environment)) return 1;
  const ShimOptions options = ParseShimArguments(arguments);
  ::setsid();
  ::signal(SIGCHLD, SIG_DFL);
  ::signal(SIGPIPE, SIG_DFL);
  const int null_fd = ::open("/dev/null", O_RDONLY);
  const int errors =
      ::open((options.run_directory + kShimLockFile).c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  if (null_fd < 0 || errors < 0) return 1;
  ::dup2(null_fd, STDIN_FILENO);
  ::dup2(errors, STDOUT_FILENO);
  ::dup2(errors, STDERR_FILENO);
  ::dup2(socket, kShimSocket);
  ::syscall(SYS_close_range, kShimSocket + 1, ~0U, 0);
  for (std::string& entry : environment) pointers.push_back(entry.data());
  pointers.push_back(nullptr);
  environ = pointers.data();
  arguments.insert(arguments.begin(), binary);
  title.Write(arguments);
  ProgramsInside titled;
  if (inside != nullptr) {
    titled = [&](const std::vector<std::string>& command) -> std::function<int()> {
      const std::function<int()> run = inside(command);
      if (run == nullptr) return nullptr;
      return [&title, &command, run] {
        title.Write(command);
        return run();
      };
    };
  }
  return RunShim(options, titled);
}

}  // namespace

absl::Status ShimServer::Start() {
  if (pid_ != 0) return absl::OkStatus();
  int sockets[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) {
    return absl::UnavailableError(absl::StrCat("socketpair: ", std::strerror(errno)));
  }
  socket_.Reset(sockets[0]);
  const UniqueFd theirs(sockets[1]);
  const timeval patience = {kAnswerSeconds, 0};
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
  ::setsockopt(socket_.get(), SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&files, theirs.get(), kServerSocket);
  posix_spawn_file_actions_addclosefrom_np(&files, kServerSocket + 1);
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
  std::string room(kTitleBytes, '-');
  std::string program = binary_;
  std::string verb = kShimServerVerb;
  char* const arguments[] = {program.data(), verb.data(), room.data(), nullptr};
  const int error = ::posix_spawn(&pid_, binary_.c_str(), &files, &attributes, arguments, environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&files);
  if (error == 0) return absl::OkStatus();
  pid_ = 0;
  return absl::UnavailableError(absl::StrCat("cannot start ", binary_, ": ", std::strerror(error)));
}

void ShimServer::End() {
  socket_.Reset();
  if (pid_ == 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

absl::StatusOr<UniqueFd> ShimServer::Fork(const ShimOptions& shim,
                                          const std::vector<std::string>& environment, int socket) {
  const std::string request = Encode(ShimArguments(shim), environment);
  // The second time with a new server, should the one before have ended.
  for (int attempt = 0; attempt < 2; ++attempt) {
    RETURN_IF_ERROR(Start());
    uint32_t error = 0;
    UniqueFd pidfd;
    if (SendNumber(socket_.get(), static_cast<uint32_t>(request.size()), socket) &&
        SendAll(socket_.get(), request) && ReceiveNumber(socket_.get(), error, pidfd)) {
      if (error == 0) return pidfd;
      return absl::UnavailableError(
          absl::StrCat("cannot fork: ", std::strerror(static_cast<int>(error))));
    }
    End();
  }
  return absl::UnavailableError(absl::StrCat(binary_, " ", kShimServerVerb, " does not answer"));
}

int RunShimServer(int argc, char** argv, const ProgramsInside& inside) {
  const Title title(argc, argv);
  const std::string binary = argv[0];
  ::prctl(PR_SET_NAME, "muster-shims");
  // The kernel reaps the shims.
  ::signal(SIGCHLD, SIG_IGN);
  ::signal(SIGPIPE, SIG_IGN);
  ::fcntl(kServerSocket, F_SETFD, FD_CLOEXEC);
  LoadFormats();
  while (true) {
    uint32_t size = 0;
    UniqueFd socket;
    if (!ReceiveNumber(kServerSocket, size, socket)) return 0;  // the daemon is gone
    if (size > kRequestBytesMax) return 1;
    std::string request(size, '\0');
    if (!ReceiveAll(kServerSocket, request)) return 0;
    const pid_t pid = ::fork();
    if (pid == 0) ::_exit(BecomeShim(request, socket.get(), binary, title, inside));
    UniqueFd pidfd;
    uint32_t error = 0;
    if (pid < 0) {
      error = static_cast<uint32_t>(errno);
    } else {
      pidfd.Reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    }
    if (!SendNumber(kServerSocket, error, pidfd.get())) return 0;
  }
}

}  // namespace muster::worker
