// The `muster` program: its commands with their flags.
#ifndef MUSTER_CLI_APP_H_
#define MUSTER_CLI_APP_H_

#include <functional>
#include <string>
#include <vector>

#include "cli/output.h"

namespace muster::cli {

// What the program takes from its process; tests make up their own.
struct Surroundings {
  Terminal terminal;
  std::function<std::string(const std::string&)> environment;  // "" when not set
  std::string working_directory;
  std::string binaries;  // directory of this program and its siblings
  std::string version;
};

// Runs the command that `arguments`, without the program's name, ask for. Returns the exit status:
// 0 done, 1 refused or failed, 2 wrong usage.
int Run(const std::vector<std::string>& arguments, Surroundings& surroundings);

}  // namespace muster::cli

#endif  // MUSTER_CLI_APP_H_
