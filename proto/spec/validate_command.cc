#include <cstddef>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/spec/checker.h"
#include "proto/spec/command_variables.h"
#include "proto/spec/names.h"

namespace muster::spec {
namespace {

constexpr int kArgumentsMax = 1024;
constexpr size_t kArgumentBytesMax = 128 << 10;  // Linux takes no longer one
constexpr int kVariablesMax = 256;
constexpr size_t kVariableNameBytesMax = 255;

bool HasNul(const std::string& text) { return text.find('\0') != std::string::npos; }

bool IsVariableName(const std::string& name) {
  if (name.empty() || absl::ascii_isdigit(name[0])) return false;
  for (const char c : name) {
    if (!absl::ascii_isalnum(c) && c != '_') return false;
  }
  return true;
}

void CheckArguments(const v1::JobSpec& spec, Checker& check) {
  if (spec.command_size() > kArgumentsMax) {
    check.Add("command", spec.command_size(), " texts; at most ", kArgumentsMax);
  }
  for (int i = 0; i < spec.command_size() && i < kArgumentsMax; ++i) {
    const std::string& argument = spec.command(i);
    const std::string path = absl::StrCat("command[", i, "]");
    if (argument.size() >= kArgumentBytesMax) {
      check.Add(path, Quoted(argument), " is longer than ", kArgumentBytesMax - 1, " bytes");
    } else if (HasNul(argument)) {
      check.Add(path, Quoted(argument), " contains a zero byte");
    }
  }
  const std::string& program = spec.command(0);
  if (program.empty()) {
    check.Add("command[0]", "empty; it names the program to run");
  } else if (program.find('/') != std::string::npos) {
    check.Path("command[0]", program, spec);
  }
}

void CheckVariables(const v1::JobSpec& spec, Checker& check) {
  if (spec.env_size() > kVariablesMax) {
    check.Add("env", spec.env_size(), " variables; at most ", kVariablesMax);
    return;
  }
  for (const auto& [name, value] : spec.env()) {
    if (!IsVariableName(name) || name.size() > kVariableNameBytesMax) {
      check.Add("env", Quoted(name),
                " is not the name of a variable: letters, digits and '_', not starting with a "
                "digit, at most ",
                kVariableNameBytesMax, " bytes");
      continue;
    }
    const std::string path = absl::StrCat("env.", name);
    if (IsReservedVariable(name)) {
      check.Add(path, "Muster sets this variable itself (docs/commands.md)");
    } else if (HasNul(value)) {
      check.Add(path, Quoted(value), " contains a zero byte");
    } else if (absl::StartsWith(value, kSecretPrefix) && !SecretIn(value).has_value()) {
      check.Add(
          path, Quoted(value),
          " is not ${secret:NAME} with a name of letters, digits, '-', '_' and '.', as a file "
          "in --secrets of the workers has (docs/commands.md)");
    } else if (name.size() + value.size() + 2 > kArgumentBytesMax) {
      check.Add(path, Quoted(value), " is longer than ", kArgumentBytesMax - name.size() - 2,
                " bytes");
    }
  }
}

}  // namespace

void CheckCommand(const v1::JobSpec& spec, Checker& check) {
  CheckArguments(spec, check);
  CheckVariables(spec, check);
  if (spec.has_checkpoint()) {
    check.Add("checkpoint",
              "is for `engine`; a command saves its own checkpoints and says where in "
              "$MUSTER_PROGRESS_FILE (docs/commands.md)");
  }
}

}  // namespace muster::spec
