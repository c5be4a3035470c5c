// The environment of a command: what torchrun gives its workers, and what Muster adds
// (docs/commands.md).
#ifndef MUSTER_WORKER_COMMAND_ENVIRONMENT_H_
#define MUSTER_WORKER_COMMAND_ENVIRONMENT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "muster/v1/rank.pb.h"

namespace muster::worker {

// What rank 0 decides for all ranks of an attempt, and tells them through the key-value store.
struct CommandStart {
  std::string master_address;  // of rank 0
  int master_port = 0;
  int64_t restore_step = 0;  // 0: no checkpoint to begin with
  std::string restore_path;

  std::string ToText() const;
  // kInvalidArgument: not a text that ToText makes.
  static absl::StatusOr<CommandStart> FromText(const std::string& text);
};

// The key of CommandStart.
constexpr char kCommandStartKey[] = "command/start";

// "NAME=value" of every variable. `inherited` is the environment of the daemon's child; in order of
// increasing weight: inherited, defaults such as PYTHONUNBUFFERED, the spec's env, what Muster
// sets. A variable of env that refers to a secret is inherited.
std::vector<std::string> CommandEnvironment(const v1::RankAssignment& assignment,
                                            const CommandStart& start,
                                            const std::vector<std::string>& inherited);

// The file to run for `program`: itself when it has a slash, else the first executable file of this
// name in the PATH of `environment`. kNotFound, kPermissionDenied: a sentence that names the
// program and where it was looked for.
absl::StatusOr<std::string> FindProgram(const std::string& program,
                                        const std::vector<std::string>& environment);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_COMMAND_ENVIRONMENT_H_
