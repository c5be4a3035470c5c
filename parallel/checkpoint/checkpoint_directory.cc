#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/checkpoint/checkpoint.h"
#include "parallel/checkpoint/manifest.h"

namespace muster::parallel {
namespace {

constexpr absl::string_view kStepPrefix = "step-";
constexpr char kMembershipMark[] = ".m";

std::string NameOf(const CheckpointId& id) {
  std::string name = absl::StrFormat("step-%08d.e%d", id.step, id.epoch.value());
  if (id.membership > 1) absl::StrAppend(&name, kMembershipMark, id.membership);
  return name;
}

// nullopt for names that NameOf cannot have made.
std::optional<CheckpointId> ParseName(const JobId& job, const std::string& name) {
  const size_t dot = name.find(".e");
  if (!absl::StartsWith(name, kStepPrefix) || dot == std::string::npos) return std::nullopt;
  CheckpointId id{.job = job};
  uint64_t epoch = 0;
  const std::string step = name.substr(kStepPrefix.size(), dot - kStepPrefix.size());
  std::string rest = name.substr(dot + 2);
  if (const size_t mark = rest.find(kMembershipMark); mark != std::string::npos) {
    if (!absl::SimpleAtoi(rest.substr(mark + sizeof(kMembershipMark) - 1), &id.membership)) {
      return std::nullopt;
    }
    rest.resize(mark);
  }
  if (!absl::SimpleAtoi(step, &id.step) || !absl::SimpleAtoi(rest, &epoch)) return std::nullopt;
  id.epoch = Epoch(epoch);
  if (NameOf(id) != name) return std::nullopt;
  return id;
}

}  // namespace

std::string CheckpointDirectory(const std::string& root, const CheckpointId& id) {
  return absl::StrCat(root, "/", id.job.value(), "/", NameOf(id));
}

absl::StatusOr<std::vector<CheckpointEntry>> ListCheckpoints(FileSystem& files,
                                                             const std::string& root,
                                                             const JobId& job) {
  absl::StatusOr<std::vector<std::string>> names = files.List(absl::StrCat(root, "/", job.value()));
  if (absl::IsNotFound(names.status())) return std::vector<CheckpointEntry>();
  RETURN_IF_ERROR(names.status());
  std::vector<CheckpointEntry> entries;
  for (const std::string& name : *names) {
    const std::optional<CheckpointId> id = ParseName(job, name);
    if (!id.has_value()) continue;
    const std::string directory = CheckpointDirectory(root, *id);
    entries.push_back({*id, directory, files.Exists(absl::StrCat(directory, "/", kManifestFile))});
  }
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.id.step, a.id.epoch, a.id.membership) <
           std::tie(b.id.step, b.id.epoch, b.id.membership);
  });
  return entries;
}

absl::Status RemoveCheckpoint(FileSystem& files, const std::string& root, const CheckpointId& id) {
  const std::string directory = CheckpointDirectory(root, id);
  const std::string manifest = absl::StrCat(directory, "/", kManifestFile);
  if (files.Exists(manifest)) {
    absl::Status removed = files.RemoveFile(manifest);
    if (!removed.ok() && !absl::IsNotFound(removed)) return removed;
    RETURN_IF_ERROR(files.SyncDirectory(directory));
  }
  RETURN_IF_ERROR(files.RemoveTree(directory));
  absl::Status synced = files.SyncDirectory(ParentDirectory(directory));
  return absl::IsNotFound(synced) ? absl::OkStatus() : synced;
}

absl::StatusOr<std::vector<CheckpointId>> PruneCheckpoints(FileSystem& files,
                                                           const std::string& root,
                                                           const JobId& job, Epoch epoch,
                                                           absl::Span<const CheckpointId> keep) {
  int64_t newest = -1;  // largest step of this epoch that is kept
  for (const CheckpointId& id : keep) {
    if (id.epoch == epoch) newest = std::max(newest, id.step);
  }
  ASSIGN_OR_RETURN(const std::vector<CheckpointEntry> entries, ListCheckpoints(files, root, job));
  std::vector<CheckpointId> removed;
  for (const CheckpointEntry& entry : entries) {
    const bool ours = entry.id.epoch < epoch || (entry.id.epoch == epoch && entry.id.step < newest);
    if (!ours || std::find(keep.begin(), keep.end(), entry.id) != keep.end()) continue;
    RETURN_IF_ERROR(RemoveCheckpoint(files, root, entry.id));
    removed.push_back(entry.id);
  }
  return removed;
}

}  // namespace muster::parallel
