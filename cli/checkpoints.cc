#include "cli/checkpoints.h"

#include <filesystem>
#include <map>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/process.h"
#include "parallel/mesh/mesh.h"

namespace muster::cli {
namespace {

// Of a job whose checkpoints are stored per host: which hosts have the parts of `record`. Empty for
// shared storage, which has them all.
std::string PartsText(const v1::Job& job, const v1::CheckpointRecord& record) {
  if (job.spec().checkpoint().storage() != v1::CHECKPOINT_STORAGE_LOCAL) return "";
  const std::string local =
      "checkpoint.storage is local, so that each host has the parts of its ranks";
  // The rank map is that of the newest attempt alone.
  if (record.epoch() != job.epoch()) {
    return absl::StrCat(local, "; `muster events ", job.name(), "` says where attempt ",
                        record.epoch(), " ran");
  }
  std::map<std::string, std::vector<int>> ranks_by_host;
  for (const v1::RankStatus& rank : job.ranks()) {
    ranks_by_host[absl::StrCat(rank.host(), " (", rank.worker(), ")")].push_back(rank.rank());
  }
  return absl::StrCat(
      local, ": ", absl::StrJoin(ranks_by_host, ", ", [](std::string* out, const auto& entry) {
        absl::StrAppend(out, entry.first, " of ranks ", parallel::RanksText(entry.second));
      }));
}

}  // namespace

std::vector<std::vector<std::string>> CheckpointRows(const v1::Job& job, bool with_removed) {
  std::vector<std::vector<std::string>> rows = {
      {"STEP", "EPOCH", "SIZE", "STATE", "COMMITTED", "PATH"}};
  for (const v1::CheckpointRecord& record : job.checkpoints()) {
    if (record.removed() && !with_removed) continue;
    rows.push_back({absl::StrCat(record.step()), absl::StrCat(record.epoch()),
                    record.bytes() > 0 ? Bytes(record.bytes()) : "-",
                    record.damaged()   ? "damaged"
                    : record.removed() ? "removed"
                                       : "committed",
                    LocalTime(record.committed()), record.path()});
  }
  return rows;
}

absl::Status Checkpoints(CoordinatorClient& client, const std::string& name, Format format,
                         Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(name));
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::CheckpointRecord& record : job.checkpoints()) list.push_back(ToJson(record));
    Print(list, format, terminal.out);
  } else if (job.checkpoints().empty()) {
    terminal.out << job.name() << " has no checkpoint yet"
                 << (job.spec().command_size() > 0
                         ? "; its command reports them in $MUSTER_PROGRESS_FILE (docs/commands.md)"
                         : "")
                 << "\n";
  } else {
    terminal.out << Table(CheckpointRows(job, /*with_removed=*/true));
    const std::string parts = PartsText(job, *job.checkpoints().rbegin());
    if (!parts.empty()) {
      terminal.out << "\nstep " << job.checkpoints().rbegin()->step() << ": " << parts << "\n";
    }
  }
  return absl::OkStatus();
}

absl::Status Sample(CoordinatorClient& client, const SampleOptions& options, Format format,
                    Terminal& terminal) {
  ASSIGN_OR_RETURN(const v1::Job job, client.GetJob(options.job));
  if (job.spec().command_size() > 0) {
    return absl::FailedPreconditionError(
        absl::StrCat(job.name(),
                     " runs a command of its own; only models of the engine can be "
                     "sampled"));
  }
  const v1::CheckpointRecord* chosen = nullptr;
  for (const v1::CheckpointRecord& record : job.checkpoints()) {
    if (record.damaged() || record.removed()) continue;
    if (options.step != 0 && record.step() != options.step) continue;
    if (chosen == nullptr || record.step() >= chosen->step()) chosen = &record;
  }
  if (chosen == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat(job.name(), " has no sound checkpoint",
                     options.step == 0 ? " yet" : absl::StrCat(" of step ", options.step),
                     "; see muster checkpoints ", job.name()));
  }
  const std::string parts = PartsText(job, *chosen);
  std::error_code ignored;
  if (!std::filesystem::is_directory(chosen->path(), ignored)) {
    return absl::FailedPreconditionError(absl::StrCat("checkpoint ", chosen->path(),
                                                      " cannot be read on this machine",
                                                      parts.empty() ? "" : "; ", parts));
  }
  std::vector<std::string> command = {options.rank_binary,
                                      "sample",
                                      "--checkpoint",
                                      chosen->path(),
                                      "--prompt=" + options.prompt,
                                      "--tokens",
                                      absl::StrCat(options.tokens),
                                      "--temperature",
                                      absl::StrCat(options.temperature),
                                      "--top-k",
                                      absl::StrCat(options.top_k),
                                      "--seed",
                                      absl::StrCat(options.seed)};
  if (options.verbose) command.push_back("--verbose");
  const absl::StatusOr<std::string> text = RunAndCapture(command);
  if (!text.ok()) {
    return absl::Status(text.status().code(),
                        absl::StrCat(text.status().message(), parts.empty() ? "" : "; ", parts));
  }
  if (format != Format::kTable) {
    Print(Json{{"job", job.name()},
               {"step", chosen->step()},
               {"checkpoint", chosen->path()},
               {"prompt", options.prompt},
               {"text", *text}},
          format, terminal.out);
    return absl::OkStatus();
  }
  terminal.out << *text << (text->empty() || text->back() != '\n' ? "\n" : "");
  return absl::OkStatus();
}

}  // namespace muster::cli
