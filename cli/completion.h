// Shell completion that asks the program itself, so that it cannot fall behind the commands.
#ifndef MUSTER_CLI_COMPLETION_H_
#define MUSTER_CLI_COMPLETION_H_

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

namespace muster::cli {

// Prints candidates for the word at the cursor; hidden from help.
inline constexpr char kCompleteCommand[] = "__complete";
// Positionals of this name are names of jobs.
inline constexpr char kJobPositional[] = "NAME";

// A script for `source <(muster completion bash)`.
std::string BashCompletion();

// The command of that name right below `parent`, or null.
const CLI::App* FindCommand(const CLI::App& parent, const std::string& name);

// What may stand in place of the last of `words`: commands, flags, or names of jobs (asked for only
// when one is wanted). Nothing means: names of files.
std::vector<std::string> Complete(const CLI::App& app, const std::vector<std::string>& words,
                                  const std::function<std::vector<std::string>()>& job_names);

}  // namespace muster::cli

#endif  // MUSTER_CLI_COMPLETION_H_
