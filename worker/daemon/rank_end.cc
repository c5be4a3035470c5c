#include "worker/daemon/rank_end.h"

#include <string.h>

#include <algorithm>
#include <csignal>

#include "absl/status/statusor.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/proc.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/log_files.h"
#include "worker/daemon/proc.h"
#include "worker/daemon/run_files.h"

namespace muster::worker {
namespace {

constexpr int64_t kLastOutputBytes = 500;

std::string SignalName(int number) {
  const char* name = ::sigabbrev_np(number);
  return name == nullptr ? absl::StrCat(number) : absl::StrCat(number, " (SIG", name, ")");
}

// What the rank printed last; empty when it printed nothing.
std::string LastOutput(const std::string& run_directory) {
  const absl::StatusOr<LogChunk> tail =
      ReadLog(run_directory + kLogDirectory, -kLastOutputBytes, kLastOutputBytes);
  if (!tail.ok()) return "";
  std::string text(absl::StripAsciiWhitespace(tail->data));
  if (const size_t end = text.rfind('\n'); end != std::string::npos) text.erase(0, end + 1);
  std::replace_if(
      text.begin(), text.end(),
      [](char c) { return absl::ascii_iscntrl(static_cast<unsigned char>(c)); }, ' ');
  return text;
}

}  // namespace

RankEnd ExplainEnd(const EndedRank& rank) {
  const std::string log = absl::StrCat("; log: ", rank.run_directory, kLogDirectory);
  const std::optional<v1::ShimExit> shim = ReadShimExit(rank.run_directory);
  const std::optional<v1::RankExitReport> report = ReadRankExitReport(rank.run_directory);
  const int64_t command =
      report.has_value() ? report->progress().command_pid() : 0;  // 0: it was none
  const std::string who =
      absl::StrCat(ToString(rank.key), " (pid ", command > 0 ? command : rank.pid, ", worker ",
                   rank.worker, ")");
  RankEnd end;
  v1::RankExit& exit = end.exit;
  exit.set_code(shim.has_value() ? shim->code() : -1);
  exit.set_signal(shim.has_value() ? shim->signal() : 0);
  if (report.has_value() && report->has_progress()) end.progress = report->progress();
  if (report.has_value() && report->cause() != v1::CAUSE_UNSPECIFIED) {
    exit.set_cause(report->cause());
    exit.set_message(report->message().substr(0, kExitMessageBytesMax));
    if (report->has_peer()) exit.set_peer(report->peer());
  } else if (!shim.has_value() && rank.boot_id != BootId()) {
    exit.set_cause(v1::CAUSE_WORKER_LOST);
    exit.set_message(absl::StrCat(who, " ended when the machine went down", log));
  } else if (!shim.has_value()) {
    exit.set_cause(v1::CAUSE_CRASH);
    exit.set_signal(SIGKILL);
    exit.set_message(absl::StrCat(who, " was killed along with its supervisor", log));
  } else if (!shim->error().empty()) {
    exit.set_cause(v1::CAUSE_LAUNCH);
    exit.set_message(absl::StrCat(who, ": ", shim->error()));
  } else if (shim->out_of_memory()) {
    exit.set_cause(v1::CAUSE_OUT_OF_MEMORY);
    exit.set_message(absl::StrCat(who, " was killed by the kernel for lack of memory", log));
  } else if (shim->signal() != 0) {
    exit.set_cause(v1::CAUSE_CRASH);
    // Common in containers and on network disks, and not obvious.
    const char* hint =
        shim->signal() == SIGBUS
            ? ": a file that it had in memory became shorter or could not be read (a "
              "data set), or /dev/shm is full"
            : "";
    exit.set_message(
        absl::StrCat(who, " was ended by signal ", SignalName(shim->signal()), hint, log));
  } else if (shim->code() != 0 && command > 0) {
    exit.set_cause(v1::CAUSE_CRASH);
    const std::string said =
        report->message().empty() ? LastOutput(rank.run_directory) : report->message();
    exit.set_message(absl::StrCat(who, " exited with status ", shim->code(),
                                  said.empty() ? "" : ": ", said, log));
  } else if (shim->code() != 0) {
    exit.set_cause(v1::CAUSE_CRASH);
    exit.set_message(
        absl::StrCat(who, " exited with status ", shim->code(), " and left no report", log));
  } else {
    exit.set_cause(v1::CAUSE_COMPLETED);
    exit.set_message(absl::StrCat(who, " exited with status 0"));
  }
  return end;
}

}  // namespace muster::worker
