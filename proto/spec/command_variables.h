// The environment variables that Muster sets for a command and a spec's `env` may not: those of
// torchrun, and its own. worker/command sets them. And what stands for a secret there.
#ifndef MUSTER_PROTO_SPEC_COMMAND_VARIABLES_H_
#define MUSTER_PROTO_SPEC_COMMAND_VARIABLES_H_

#include <algorithm>
#include <array>
#include <optional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace muster::spec {

// All variables of Muster's own begin with it.
constexpr absl::string_view kMusterVariablePrefix = "MUSTER_";

constexpr std::array<absl::string_view, 19> kTorchrunVariables = {"CUDA_DEVICE_ORDER",
                                                                  "CUDA_VISIBLE_DEVICES",
                                                                  "GROUP_RANK",
                                                                  "GROUP_WORLD_SIZE",
                                                                  "LOCAL_RANK",
                                                                  "LOCAL_WORLD_SIZE",
                                                                  "MASTER_ADDR",
                                                                  "MASTER_PORT",
                                                                  "NODE_RANK",
                                                                  "RANK",
                                                                  "ROLE_NAME",
                                                                  "ROLE_RANK",
                                                                  "ROLE_WORLD_SIZE",
                                                                  "TORCHELASTIC_ERROR_FILE",
                                                                  "TORCHELASTIC_MAX_RESTARTS",
                                                                  "TORCHELASTIC_RESTART_COUNT",
                                                                  "TORCHELASTIC_RUN_ID",
                                                                  "TORCHELASTIC_USE_AGENT_STORE",
                                                                  "WORLD_SIZE"};

inline bool IsReservedVariable(absl::string_view name) {
  return absl::StartsWith(name, kMusterVariablePrefix) ||
         std::find(kTorchrunVariables.begin(), kTorchrunVariables.end(), name) !=
             kTorchrunVariables.end();
}

// The name in "${secret:NAME}", for which the worker puts the value of its secret NAME; no value:
// `value` is something else. A name has letters, digits, '-', '_' and '.', does not start with '.',
// and is at most 253 bytes long.
constexpr absl::string_view kSecretPrefix = "${secret:";
inline std::optional<std::string> SecretIn(absl::string_view value) {
  if (!absl::ConsumePrefix(&value, kSecretPrefix) || !absl::ConsumeSuffix(&value, "}")) {
    return std::nullopt;
  }
  const bool plain = std::all_of(value.begin(), value.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '-' || c == '_' || c == '.';
  });
  if (!plain || value.empty() || value[0] == '.' || value.size() > 253) return std::nullopt;
  return std::string(value);
}

}  // namespace muster::spec

#endif  // MUSTER_PROTO_SPEC_COMMAND_VARIABLES_H_
