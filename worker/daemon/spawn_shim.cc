#include "worker/daemon/spawn_shim.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "worker/command/mps.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

// What another account has no use for: where the daemon's keys are, and sockets of its session.
bool IsOfTheDaemon(const std::string& name) {
  for (const char* prefix : {"MUSTER_TLS_", "XDG_", "DBUS_", "SSH_", "SUDO_"}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  return name == "CREDENTIALS_DIRECTORY" || name == "NOTIFY_SOCKET" || name == "MAIL";
}

// Libraries size their thread pools from these; without them each rank would take every core.
std::vector<std::string> RankEnvironment(const v1::RankAssignment& assignment,
                                         const std::map<std::string, std::string>& secrets,
                                         const std::optional<security::Account>& account) {
  const std::string threads = absl::StrCat(assignment.threads());
  std::map<std::string, std::string> ours = {
      {"OMP_NUM_THREADS", threads},
      {"OPENBLAS_NUM_THREADS", threads},
      {"MKL_NUM_THREADS", threads},
      // The daemon numbers devices in this order.
      {"CUDA_DEVICE_ORDER", "PCI_BUS_ID"},
      {"MUSTER_JOB_ID", assignment.job_id()},
      {"MUSTER_EPOCH", absl::StrCat(assignment.epoch())},
      {"MUSTER_RANK", absl::StrCat(assignment.rank())},
  };
  // The engine sees all GPUs, and so does MPS with its numbers.
  int device = 0;
  absl::string_view ordinal = assignment.device();
  if (assignment.mps() && absl::ConsumePrefix(&ordinal, "cuda:") &&
      absl::SimpleAtoi(ordinal, &device)) {
    for (const auto& [name, value] : MpsVariables(assignment, device)) ours[name] = value;
  }
  if (account.has_value()) {
    ours["USER"] = ours["LOGNAME"] = account->name;
    ours["HOME"] = account->home;
    ours["SHELL"] = account->shell;
  }
  for (const auto& [name, value] : secrets) ours[name] = value;
  std::vector<std::string> environment;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text(*entry);
    const std::string name = text.substr(0, text.find('='));
    if (ours.count(name) > 0 || (account.has_value() && IsOfTheDaemon(name))) continue;
    environment.push_back(text);
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

}  // namespace

absl::StatusOr<pid_t> SpawnShim(const std::string& binary, const ShimOptions& shim, int socket,
                                const v1::RankAssignment& assignment,
                                const std::map<std::string, std::string>& secrets,
                                const std::optional<security::Account>& account) {
  const std::vector<std::string> environment = RankEnvironment(assignment, secrets, account);
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

}  // namespace muster::worker
