// Shell completion, and hints for mistyped commands. Both read the declared commands, so that they
// are never out of date.
#ifndef MUSTER_CLI_COMPLETION_H_
#define MUSTER_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace muster::cli {

// The command that prints candidates for the word at the cursor; it is not in the help.
inline constexpr char kCompleteCommand[] = "__complete";
// Positionals of this name are names of jobs.
inline constexpr char kJobPositional[] = "NAME";

// A script for `source <(muster completion bash)`.
std::string BashCompletion();

// For arguments that were refused: says which word is no command, and the nearest one that is.
// Empty when all commands among them exist.
std::string UnknownCommand(const CLI::App& app, const std::vector<std::string>& arguments);

// Candidates for the last of `words`: commands, flags or names of jobs. `job_names` is called only
// when a name of a job may follow. Empty: the shell completes names of files.
std::vector<std::string> Complete(const CLI::App& app, const std::vector<std::string>& words,
                                  const std::function<std::vector<std::string>()>& job_names);

}  // namespace muster::cli

#endif  // MUSTER_CLI_COMPLETION_H_
