#include "cli/admin.h"

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/process.h"
#include "proto/spec/names.h"

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

absl::Status Snapshot(CoordinatorClient& client, const std::string& path, Format format,
                      Terminal& terminal) {
  const std::string partial = path + ".partial";
  int64_t bytes = 0;
  absl::Status status;
  {
    std::ofstream file(partial, std::ios::binary);
    status = client.Snapshot([&](const v1::SnapshotChunk& chunk) {
      bytes += static_cast<int64_t>(chunk.data().size());
      file << chunk.data();
      return file.good();
    });
    file.close();
    if (status.ok() && !file) status = absl::UnavailableError(partial + ": cannot be written");
  }
  std::error_code error;
  if (status.ok()) {
    std::filesystem::rename(partial, path, error);
    if (error) status = absl::UnavailableError(absl::StrCat(path, ": ", error.message()));
  }
  if (!status.ok()) {
    std::filesystem::remove(partial, error);
    return status;
  }
  if (format != Format::kTable) {
    Print(Json{{"path", path}, {"bytes", bytes}}, format, terminal.out);
  } else {
    terminal.out << path << ", " << Bytes(bytes) << "; see it with: muster replay " << path << "\n";
  }
  return absl::OkStatus();
}

namespace {

// How the plans of the log compare with those made again.
void PrintDecisions(const Json& report, Terminal& terminal) {
  std::vector<std::vector<std::string>> rows = {{"ENTRY", "JOB", "DECIDED THEN", "DECIDED NOW"}};
  for (const Json& difference : report["decisions"]) {
    rows.push_back({absl::StrCat(difference.value("entry", int64_t{0})),
                    difference.value("job", ""), difference.value("then", ""),
                    difference.value("now", "")});
  }
  if (rows.size() > 1) terminal.out << "\n" << Table(rows) << "\n";
  const int64_t plans = report.value("plans", int64_t{0});
  const int64_t different = report.value("plansDifferent", int64_t{0});
  terminal.out << plans << " plans of the scheduler made again: ";
  if (different == 0) {
    terminal.out << "they decide the same\n";
  } else {
    terminal.out << different << " of them decide something else\n";
  }
  for (const Json& group : report["notComparable"]) {
    terminal.out << group.value("plans", int64_t{0})
                 << " not comparable: " << group.value("reason", "") << "\n";
  }
}

}  // namespace

absl::Status ReplayState(const ReplayOptions& options, Format format, Terminal& terminal) {
  std::vector<std::string> command = {options.coordinator_binary, "replay", options.file};
  if (!options.from.empty()) command.push_back("--from=" + options.from);
  if (options.until > 0) command.push_back(absl::StrCat("--until=", options.until));
  ASSIGN_OR_RETURN(const Json report, RunStateTool(command));
  const Json& differences = report["differences"];
  if (format != Format::kTable) {
    Print(report, format, terminal.out);
  } else {
    std::vector<std::vector<std::string>> rows = {
        {"JOB", "STATE", "EPOCH", "ATTEMPTS", "FAILURES", "COMMITTED"}};
    for (const Json& job : report["jobs"]) {
      v1::JobState state = v1::JOB_STATE_UNSPECIFIED;
      v1::JobState_Parse(job.value("state", ""), &state);
      const auto number = [&job](const char* key) {
        return absl::StrCat(job.value(key, int64_t{0}));
      };
      rows.push_back({job.value("id", ""), Coloured(spec::EnumName(state), terminal),
                      number("epoch"), number("attempts"), number("failures"),
                      number("lastCommittedStep")});
    }
    if (rows.size() > 1) terminal.out << Table(rows) << "\n";
    terminal.out << absl::StrFormat(
        "cluster %s, %d entries of the log replayed, %d to %d", report.value("clusterId", ""),
        report.value("entries", int64_t{0}), report.value("firstEntry", int64_t{0}),
        report.value("lastEntry", int64_t{0}));
    if (options.until == 0 && differences.empty()) {
      terminal.out << ": equal to the stored state, byte by byte";
    }
    terminal.out << "\n";
    PrintDecisions(report, terminal);
  }
  if (differences.empty()) {
    const int64_t different = report.value("plansDifferent", int64_t{0});
    if (!options.strict || different == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat(different, " of ", report.value("plans", int64_t{0}),
                     " plans of the scheduler decide something else than then"));
  }
  std::vector<std::string> named;
  for (const Json& difference : differences) named.push_back(difference.get<std::string>());
  return absl::DataLossError(
      absl::StrCat("the stored state is not what its log says: ", absl::StrJoin(named, "; ")));
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
