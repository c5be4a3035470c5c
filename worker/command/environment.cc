#include "worker/command/environment.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "proto/spec/command_variables.h"
#include "proto/spec/share.h"
#include "worker/command/mps.h"
#include "worker/run_directory/run_directory.h"

namespace muster::worker {
namespace {

constexpr char kDefaultPath[] = "/usr/local/bin:/usr/bin:/bin";

// Of this attempt alone: a value of another one must not be inherited.
constexpr const char* kVariablesOfAttempt[] = {"MUSTER_RESTORE_PATH", "MUSTER_RESTORE_STEP",
                                               "MUSTER_DEVICE_SHARE", "MUSTER_DEVICE_MEMORY_LIMIT"};

// The ordinals of the job's GPUs on this worker, by local rank, so that cuda:$LOCAL_RANK is the
// rank's own. Empty on CPUs, which hides GPUs that belong to others.
std::string VisibleGpus(const v1::RankAssignment& assignment) {
  std::vector<std::string> devices(assignment.local_devices().begin(),
                                   assignment.local_devices().end());
  if (devices.empty()) devices.push_back(assignment.device());
  std::vector<std::string> ordinals;
  for (const std::string& device : devices) {
    absl::string_view ordinal = device;
    if (absl::ConsumePrefix(&ordinal, "cuda:")) ordinals.emplace_back(ordinal);
  }
  return absl::StrJoin(ordinals, ",");
}

std::map<std::string, std::string> VariablesOf(const v1::RankAssignment& assignment,
                                               const CommandStart& start) {
  const std::string rank = absl::StrCat(assignment.rank());
  const std::string world = absl::StrCat(assignment.world_size());
  const std::string group = absl::StrCat(assignment.group_rank());
  std::map<std::string, std::string> variables = {
      {"RANK", rank},
      {"LOCAL_RANK", absl::StrCat(assignment.local_rank())},
      {"WORLD_SIZE", world},
      {"LOCAL_WORLD_SIZE", absl::StrCat(std::max(1, assignment.local_ranks()))},
      {"NODE_RANK", group},
      {"GROUP_RANK", group},
      {"GROUP_WORLD_SIZE", absl::StrCat(std::max(1, assignment.group_world_size()))},
      {"ROLE_NAME", "default"},
      {"ROLE_RANK", rank},
      {"ROLE_WORLD_SIZE", world},
      {"MASTER_ADDR", start.master_address},
      {"MASTER_PORT", absl::StrCat(start.master_port)},
      {"CUDA_DEVICE_ORDER", "PCI_BUS_ID"},  // the daemon numbers devices in this order
      {"CUDA_VISIBLE_DEVICES", VisibleGpus(assignment)},
      {"TORCHELASTIC_ERROR_FILE", assignment.run_directory() + kCommandErrorFile},
      {"TORCHELASTIC_MAX_RESTARTS", absl::StrCat(assignment.spec().restart().max_failures())},
      {"TORCHELASTIC_RESTART_COUNT", absl::StrCat(std::max(1, assignment.attempt()) - 1)},
      {"TORCHELASTIC_RUN_ID", assignment.job_id()},
      // Rank 0 listens on MASTER_PORT itself.
      {"TORCHELASTIC_USE_AGENT_STORE", "False"},
      {"MUSTER_JOB_ID", assignment.job_id()},
      {"MUSTER_JOB_NAME", assignment.job_name()},
      {"MUSTER_EPOCH", absl::StrCat(assignment.epoch())},
      {"MUSTER_ATTEMPT", absl::StrCat(std::max(1, assignment.attempt()))},
      {"MUSTER_RANK", rank},
      {"MUSTER_WORKER", assignment.worker()},
      {"MUSTER_DEVICE", assignment.device()},
      {"MUSTER_RUN_DIRECTORY", assignment.run_directory()},
      {"MUSTER_PROGRESS_FILE", assignment.run_directory() + kCommandProgressFile},
  };
  if (const int32_t share = spec::ShareOf(assignment.spec()); share < spec::kWholeDevice) {
    variables["MUSTER_DEVICE_SHARE"] =
        absl::StrCat(static_cast<double>(share) / spec::kWholeDevice);
  }
  if (assignment.device_memory_limit_bytes() > 0) {
    variables["MUSTER_DEVICE_MEMORY_LIMIT"] = absl::StrCat(assignment.device_memory_limit_bytes());
  }
  // The command sees the GPUs of its job alone, by local rank.
  if (assignment.mps()) variables.merge(MpsVariables(assignment, assignment.local_rank()));
  if (assignment.spec().has_array_task()) {
    const v1::ArrayTask& task = assignment.spec().array_task();
    variables["MUSTER_ARRAY_INDEX"] = absl::StrCat(task.index());
    for (const v1::ArrayValue& value : task.values()) {
      variables[absl::StrCat("MUSTER_ARRAY_", absl::AsciiStrToUpper(value.key()))] = value.value();
    }
  }
  if (start.restore_step > 0) {
    variables["MUSTER_RESTORE_PATH"] = start.restore_path;
    variables["MUSTER_RESTORE_STEP"] = absl::StrCat(start.restore_step);
  }
  return variables;
}

}  // namespace

std::string CommandStart::ToText() const {
  return absl::StrCat(master_address, "\n", master_port, "\n", restore_step, "\n", restore_path);
}

absl::StatusOr<CommandStart> CommandStart::FromText(const std::string& text) {
  const std::vector<std::string> lines = absl::StrSplit(text, absl::MaxSplits('\n', 3));
  CommandStart start;
  if (lines.size() != 4 || !absl::SimpleAtoi(lines[1], &start.master_port) ||
      !absl::SimpleAtoi(lines[2], &start.restore_step)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the value of key ", kCommandStartKey, " is not what rank 0 writes"));
  }
  start.master_address = lines[0];
  start.restore_path = lines[3];
  return start;
}

std::vector<std::string> CommandEnvironment(const v1::RankAssignment& assignment,
                                            const CommandStart& start,
                                            const std::vector<std::string>& inherited) {
  std::map<std::string, std::string> variables;
  for (const std::string& entry : inherited) {
    const std::pair<std::string, std::string> parts =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    variables.insert(parts);
  }
  for (const char* name : kVariablesOfAttempt) variables.erase(name);
  // What a command prints is seen at once, and not when a buffer is full.
  variables.emplace("PYTHONUNBUFFERED", "1");
  variables.emplace("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1");
  for (const auto& [name, value] : assignment.spec().env()) {
    // The daemon has put the secret's value into this process's environment.
    if (!spec::SecretIn(value).has_value()) variables[name] = value;
  }
  for (auto& [name, value] : VariablesOf(assignment, start)) variables[name] = value;
  std::vector<std::string> environment;
  for (const auto& [name, value] : variables) {
    environment.push_back(absl::StrCat(name, "=", value));
  }
  return environment;
}

absl::StatusOr<std::string> FindProgram(const std::string& program,
                                        const std::vector<std::string>& environment) {
  const auto executable = [](const std::string& path) {
    struct stat info = {};
    return ::stat(path.c_str(), &info) == 0 && S_ISREG(info.st_mode) &&
           ::access(path.c_str(), X_OK) == 0;
  };
  if (program.find('/') != std::string::npos) {
    if (executable(program)) return program;
    struct stat info = {};
    if (::stat(program.c_str(), &info) != 0) {
      return absl::NotFoundError(absl::StrCat("there is no file ", program));
    }
    return absl::PermissionDeniedError(
        absl::StrCat(program, S_ISREG(info.st_mode)
                                  ? " is not executable; chmod +x it, or name its interpreter first"
                                  : " is not a file"));
  }
  std::string path = kDefaultPath;
  for (const std::string& entry : environment) {
    absl::string_view value = entry;
    if (absl::ConsumePrefix(&value, "PATH=")) path = std::string(value);
  }
  for (const std::string& folder : std::vector<std::string>(absl::StrSplit(path, ':'))) {
    const std::string candidate = absl::StrCat(folder.empty() ? "." : folder, "/", program);
    if (executable(candidate)) return candidate;
  }
  return absl::NotFoundError(
      absl::StrCat("there is no program ", program, " in PATH (", path, ")"));
}

}  // namespace muster::worker
