#include "cli/admin.h"

#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "cli/process.h"

namespace muster::cli {
namespace {

// What `muster-coordinator verify` or `restore` printed.
absl::StatusOr<Json> RunStateTool(const std::vector<std::string>& command) {
  ASSIGN_OR_RETURN(const std::string text, RunAndCapture(command));
  Json contents = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!contents.is_object()) {
    return absl::InternalError(
        absl::StrCat("muster-coordinator printed no JSON: ", text.substr(0, 200)));
  }
  return contents;
}

void PrintContents(const Json& contents, const std::string& what, Format format,
                   Terminal& terminal) {
  if (format != Format::kTable) return Print(contents, format, terminal.out);
  const auto number = [&contents](const char* key) { return contents.value(key, int64_t{0}); };
  terminal.out << absl::StrFormat(
      "%s: cluster %s, %d jobs (%d unfinished), %d workers, %d events up to %d, leader term %d\n",
      what, contents.value("clusterId", ""), number("jobs"), number("liveJobs"), number("workers"),
      number("events"), number("lastEvent"), number("leaderTerm"));
}

}  // namespace

absl::Status RemoveWorker(CoordinatorClient& client, const std::string& name, Format format,
                          Terminal& terminal) {
  RETURN_IF_ERROR(client.RemoveWorker(name));
  if (format != Format::kTable) {
    Print(Json{{"name", name}, {"removed", true}}, format, terminal.out);
  } else {
    terminal.out << "worker " << name << " removed\n";
  }
  return absl::OkStatus();
}

absl::Status Backup(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::BackupResponse backup, client.Backup());
  if (format != Format::kTable) {
    Print(Json{{"path", backup.path()}, {"bytes", backup.bytes()}}, format, terminal.out);
  } else {
    terminal.out << backup.path() << " on the coordinator's host, " << Bytes(backup.bytes())
                 << "\n";
  }
  return absl::OkStatus();
}

absl::Status VerifyState(const StateOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const Json contents,
                   RunStateTool({options.coordinator_binary, "verify", options.backup}));
  PrintContents(contents, "sound", format, terminal);
  return absl::OkStatus();
}

absl::Status RestoreState(const StateOptions& options, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const Json contents,
                   RunStateTool({options.coordinator_binary, "restore", options.backup,
                                 absl::StrCat("--data-dir=", options.data_dir)}));
  PrintContents(contents, absl::StrCat("restored to ", options.data_dir), format, terminal);
  if (format == Format::kTable) {
    terminal.out << "start it with: muster-coordinator --data-dir " << options.data_dir << " ...\n";
  }
  return absl::OkStatus();
}

}  // namespace muster::cli
