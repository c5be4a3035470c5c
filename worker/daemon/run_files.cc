#include "worker/daemon/run_files.h"

#include <google/protobuf/util/json_util.h>

#include <cstdint>
#include <map>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file_system.h"
#include "base/status_macros.h"
#include "worker/daemon/core/limits.h"
#include "worker/daemon/rank_files.h"

namespace muster::worker {
namespace {

template <typename Message>
std::optional<Message> ReadJson(const std::string& path) {
  const absl::StatusOr<std::string> text = PosixFileSystem()->Read(path);
  if (!text.ok()) return std::nullopt;
  Message message;
  // A newer daemon's file may have fields that this one does not know.
  google::protobuf::util::JsonParseOptions options;
  options.ignore_unknown_fields = true;
  if (!google::protobuf::util::JsonStringToMessage(*text, &message, options).ok()) {
    return std::nullopt;
  }
  return message;
}

template <typename Message>
std::optional<Message> ReadBytes(const std::string& path) {
  const absl::StatusOr<std::string> bytes = PosixFileSystem()->Read(path);
  Message message;
  if (!bytes.ok() || !message.ParseFromString(*bytes)) return std::nullopt;
  return message;
}

template <typename Message>
absl::StatusOr<std::string> JsonOf(const Message& message) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  std::string text;
  const auto status = google::protobuf::util::MessageToJsonString(message, &text, options);
  if (!status.ok()) return absl::InternalError(std::string(status.message()));
  return text + "\n";
}

}  // namespace

std::optional<v1::ShimRecord> ReadShimRecord(const std::string& run_directory) {
  return ReadJson<v1::ShimRecord>(run_directory + kShimFile);
}
std::optional<v1::ShimExit> ReadShimExit(const std::string& run_directory) {
  return ReadJson<v1::ShimExit>(run_directory + kShimExitFile);
}
std::optional<v1::RankExitReport> ReadRankExitReport(const std::string& run_directory) {
  const absl::StatusOr<std::string> bytes =
      RankFiles(run_directory).Read(kRankExitFile, kReportBytesMax);
  v1::RankExitReport report;
  if (!bytes.ok() || !report.ParseFromString(*bytes)) return std::nullopt;
  return report;
}
std::optional<v1::RankAssignment> ReadAssignment(const std::string& run_directory) {
  return ReadBytes<v1::RankAssignment>(run_directory + kAssignmentFile);
}
std::optional<v1::HeldByRank> ReadHeld(const std::string& run_directory) {
  return ReadBytes<v1::HeldByRank>(run_directory + kHeldFile);
}

std::vector<v1::CheckpointRecord> ReadCommitRequests(const std::string& run_directory) {
  const RankFiles files(run_directory);
  std::map<int64_t, v1::CheckpointRecord> by_step;
  for (const std::string& name : files.List(kCommitDirectory, kCommitsMax)) {
    if (!absl::EndsWith(name, ".pb")) continue;
    const absl::StatusOr<std::string> bytes =
        files.Read(absl::StrCat(kCommitDirectory, "/", name), kReportBytesMax);
    v1::CommitRequest request;
    if (!bytes.ok() || !request.ParseFromString(*bytes)) continue;
    if (request.checkpoint().step() > 0) {
      by_step[request.checkpoint().step()] = request.checkpoint();
    }
  }
  std::vector<v1::CheckpointRecord> commits;
  for (auto& [step, checkpoint] : by_step) commits.push_back(std::move(checkpoint));
  return commits;
}

void LoadFormats() {
  (void)JsonOf(v1::ShimRecord()).ok();
  (void)JsonOf(v1::ShimExit()).ok();
}

absl::Status WriteShimRecord(const std::string& run_directory, const v1::ShimRecord& record) {
  ASSIGN_OR_RETURN(const std::string text, JsonOf(record));
  return PosixFileSystem()->WriteUnsynced(run_directory + kShimFile, text);
}
absl::Status WriteShimExit(const std::string& run_directory, const v1::ShimExit& exit) {
  ASSIGN_OR_RETURN(const std::string text, JsonOf(exit));
  return PosixFileSystem()->WriteUnsynced(run_directory + kShimExitFile, text);
}

}  // namespace muster::worker
