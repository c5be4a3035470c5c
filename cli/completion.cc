#include "cli/completion.h"

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "proto/spec/names.h"

namespace muster::cli {
namespace {

// The command of that name right below `parent`, or null.
const CLI::App* FindCommand(const CLI::App& parent, const std::string& name) {
  for (const CLI::App* command : parent.get_subcommands(nullptr)) {
    if (command->get_name() == name) return command;
  }
  return nullptr;
}

}  // namespace

std::string BashCompletion() {
  return R"SCRIPT(# bash completion for muster: source <(muster completion bash)
_muster() {
  local IFS=$'\n' candidates
  candidates=$("${COMP_WORDS[0]}" __complete -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
  COMPREPLY=($(compgen -W "$candidates" -- "${COMP_WORDS[COMP_CWORD]}"))
}
complete -o default -F _muster muster
)SCRIPT";
}

std::string UnknownCommand(const CLI::App& app, const std::vector<std::string>& arguments) {
  const CLI::App* command = &app;
  for (const std::string& word : arguments) {
    if (const CLI::App* below = FindCommand(*command, word)) {
      command = below;
      continue;
    }
    std::vector<std::string> names;
    for (const CLI::App* below : command->get_subcommands(nullptr)) {
      names.push_back(below->get_name());
    }
    if (names.empty() || absl::StartsWith(word, "-")) return "";
    const std::string nearest = spec::NearestName(word, names);
    const bool top = command->get_parent() == nullptr;
    const std::string prefix = top ? "" : absl::StrCat(command->get_name(), " ");
    std::string hint;
    if (!nearest.empty()) {
      hint = absl::StrCat("; did you mean '", prefix, nearest, "'?");
    } else if (!top) {
      hint = absl::StrCat("; it goes on with ", absl::StrJoin(names, ", "));
    }
    return absl::StrCat("unknown command ", spec::Quoted(absl::StrCat(prefix, word)), hint,
                        "; see muster ", prefix, "--help");
  }
  return "";
}

std::vector<std::string> Complete(const CLI::App& app, const std::vector<std::string>& words,
                                  const std::function<std::vector<std::string>()>& job_names) {
  const CLI::App* command = &app;
  const std::string last = words.empty() ? "" : words.back();
  const CLI::Option* wants_value = nullptr;
  int positionals = 0;
  for (size_t i = 0; i + 1 < words.size(); ++i) {
    if (wants_value != nullptr) {
      wants_value = nullptr;
    } else if (absl::StartsWith(words[i], "-")) {
      for (const CLI::App* from = command; from != nullptr; from = from->get_parent()) {
        const CLI::Option* option = from->get_option_no_throw(words[i]);
        if (option == nullptr) continue;
        if (option->get_items_expected_max() > 0) wants_value = option;
        break;
      }
    } else if (const CLI::App* below = FindCommand(*command, words[i])) {
      command = below;
    } else {
      ++positionals;
    }
  }
  std::vector<std::string> candidates;
  const auto offer = [&](const std::string& word) {
    if (absl::StartsWith(word, last)) candidates.push_back(word);
  };
  if (wants_value != nullptr) {
    if (wants_value->check_lname("format")) {
      for (const char* format : {"table", "json", "yaml"}) offer(format);
    }
    return candidates;
  }
  if (absl::StartsWith(last, "-")) {
    for (const CLI::App* from = command; from != nullptr; from = from->get_parent()) {
      for (const CLI::Option* option : from->get_options()) {
        for (const std::string& name : option->get_lnames()) offer("--" + name);
      }
    }
    return candidates;
  }
  for (const CLI::App* below : command->get_subcommands(nullptr)) {
    if (!below->get_group().empty()) offer(below->get_name());
  }
  const CLI::Option* name = command->get_option_no_throw(kJobPositional);
  if (name != nullptr && positionals < name->get_expected_max()) {
    for (const std::string& job : job_names()) offer(job);
  }
  return candidates;
}

}  // namespace muster::cli
