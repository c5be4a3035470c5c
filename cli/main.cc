// muster: the client. Reads terminal, environment and working directory, and runs the command.
#include <signal.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <system_error>

#include "cli/app.h"

namespace {

int Columns() {
  winsize size = {};
  if (::ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace

int main(int argc, char** argv) {
  // So that `muster events -f | head` ends without an error.
  ::signal(SIGPIPE, SIG_DFL);
  const auto environment = [](const std::string& name) {
    const char* value = std::getenv(name.c_str());
    return std::string(value == nullptr ? "" : value);
  };
  const bool is_tty = ::isatty(STDOUT_FILENO) == 1 && environment("TERM") != "dumb";
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  muster::cli::Surroundings surroundings = {
      .terminal = {.out = std::cout,
                   .err = std::cerr,
                   .is_tty = is_tty,
                   .colour = is_tty && environment("NO_COLOR").empty(),
                   .columns = Columns()},
      .environment = environment,
      .working_directory = std::filesystem::current_path(error).string(),
      .binaries = self.parent_path().string(),
      .version = MUSTER_VERSION,
  };
  return muster::cli::Run(std::vector<std::string>(argv + 1, argv + argc), surroundings);
}
