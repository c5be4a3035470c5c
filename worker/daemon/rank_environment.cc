#include "worker/daemon/rank_environment.h"

#include <unistd.h>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "worker/command/mps.h"

namespace muster::worker {
namespace {

// What another account has no use for: where the daemon's keys are, and sockets of its session.
bool IsOfTheDaemon(const std::string& name) {
  for (const char* prefix : {"MUSTER_TLS_", "XDG_", "DBUS_", "SSH_", "SUDO_"}) {
    if (absl::StartsWith(name, prefix)) return true;
  }
  return name == "CREDENTIALS_DIRECTORY" || name == "NOTIFY_SOCKET" || name == "MAIL";
}

}  // namespace

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

}  // namespace muster::worker
