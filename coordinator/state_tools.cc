#include "coordinator/state_tools.h"

#include <google/protobuf/io/zero_copy_stream_impl.h>
#include <google/protobuf/util/delimited_message_util.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/schema.h"
#include "coordinator/store/store.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {
namespace {

namespace fs = std::filesystem;

absl::Status Failed(const std::string& what, const std::error_code& error) {
  return absl::UnavailableError(absl::StrCat("cannot ", what, ": ", error.message()));
}

// Opens the copy and marks it, so that nothing but a whole restore is left behind.
absl::Status Mark(const std::string& copy, Rng& rng, absl::Time now) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, OpenRocksDbStore(copy, "", ""));
  return MarkRestored(*store, rng, now);
}

constexpr size_t kRowsPerWrite = 4096;

// Opens a backup, or reads a snapshot's file into memory.
absl::StatusOr<std::unique_ptr<Store>> OpenSnapshot(const std::string& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) return OpenRocksDbStoreForReading(path);
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": no such file or directory"));
  auto store = MemoryStore::Make("");
  google::protobuf::io::IstreamInputStream stream(&file);
  Batch rows;
  while (true) {
    v1::SnapshotRow row;
    bool at_end = false;
    if (!google::protobuf::util::ParseDelimitedFromZeroCopyStream(&row, &stream, &at_end)) {
      if (at_end) break;
      return absl::DataLossError(absl::StrCat(
          path, ": is no snapshot, or was cut off; `muster admin snapshot` makes one"));
    }
    const std::optional<Table> table = TableNamed(row.table());
    if (!table.has_value()) {
      return absl::FailedPreconditionError(absl::StrCat(
          path, ": has the unknown table '", row.table(), "'; was it made by a newer version?"));
    }
    rows.Put(*table, row.key(), row.value());
    if (rows.changes.size() == kRowsPerWrite) {
      RETURN_IF_ERROR(store->Write({std::exchange(rows, Batch())}));
    }
  }
  RETURN_IF_ERROR(store->Write({rows}));
  return std::unique_ptr<Store>(std::move(store));
}

absl::Status CheckSchema(Store& store, const std::string& path) {
  ASSIGN_OR_RETURN(const auto version, store.Get(Table::kMeta, kMetaSchemaVersion));
  uint32_t found = 0;
  if (version.has_value() && absl::SimpleAtoi(*version, &found) && found >= kFirstSchemaWithLog &&
      found <= kSchemaVersion) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      absl::StrCat(path, ": has schema ", version.value_or("unknown"), ", this program replays ",
                   kFirstSchemaWithLog, " to ", kSchemaVersion));
}

// The jobs among the rows, by submission.
absl::StatusOr<std::vector<v1::Job>> JobsOf(const LoggedRows& rows) {
  std::map<uint64_t, v1::Job> jobs;
  for (const auto& [row, value] : rows) {
    if (row.first != Table::kSpecs) continue;
    v1::SpecRow spec;
    RETURN_IF_ERROR(schema::Parse(row.first, row.second, value, spec));
    v1::Job& job = jobs[spec.submit_sequence()];
    job.set_id(spec.id());
    job.set_name(spec.name());
    const auto found = rows.find({Table::kStates, row.second});
    if (found == rows.end()) continue;
    v1::StateRow state;
    RETURN_IF_ERROR(schema::Parse(Table::kStates, row.second, found->second, state));
    job.set_state(state.state());
    job.set_message(state.message());
    job.set_epoch(state.epoch());
    job.set_attempts(state.attempts());
    job.set_failures(state.failures());
    job.set_last_committed_step(state.last_committed_step());
  }
  std::vector<v1::Job> list;
  for (auto& [sequence, job] : jobs) list.push_back(std::move(job));
  return list;
}

}  // namespace

absl::StatusOr<ReplayReport> ReplayState(const ReplayOptions& options) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, OpenSnapshot(options.path));
  RETURN_IF_ERROR(CheckSchema(*store, options.path));
  std::unique_ptr<Store> from;
  ReplayReport report;
  ASSIGN_OR_RETURN(const auto cluster, store->Get(Table::kMeta, kMetaClusterId));
  report.cluster_id = cluster.value_or("");
  if (!options.from.empty()) {
    ASSIGN_OR_RETURN(from, OpenSnapshot(options.from));
    RETURN_IF_ERROR(CheckSchema(*from, options.from));
    ASSIGN_OR_RETURN(const auto other, from->Get(Table::kMeta, kMetaClusterId));
    if (other != cluster) {
      return absl::FailedPreconditionError(absl::StrCat(options.from, ": is of cluster ",
                                                        other.value_or(""), ", ", options.path,
                                                        " of ", report.cluster_id));
    }
  }
  DecisionReplay decisions;
  ASSIGN_OR_RETURN(report.replayed, Replay(*store, from.get(), options.until, &decisions));
  report.decisions = decisions.report();
  ASSIGN_OR_RETURN(report.jobs, JobsOf(report.replayed.rows));
  return report;
}

absl::StatusOr<StoreContents> VerifyBackup(const std::string& directory) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Store> store, OpenRocksDbStoreForReading(directory));
  return Verify(*store);
}

absl::StatusOr<StoreContents> RestoreBackup(const std::string& directory,
                                            const std::string& data_dir, Rng& rng, absl::Time now) {
  ASSIGN_OR_RETURN(const StoreContents contents, VerifyBackup(directory));
  const std::string target = StateDirectoryOf(data_dir), partial = target + ".partial";
  std::error_code error;
  if (fs::exists(target, error)) {
    return absl::AlreadyExistsError(
        absl::StrCat(target,
                     " exists: a backup is restored to a new data directory, never over a "
                     "state; move the old one away or name another --data-dir"));
  }
  fs::create_directories(data_dir, error);
  if (error) return Failed(absl::StrCat("make ", data_dir), error);
  fs::remove_all(partial, error);
  fs::copy(directory, partial, fs::copy_options::recursive, error);
  absl::Status status = error ? Failed(absl::StrCat("copy ", directory, " to ", partial), error)
                              : Mark(partial, rng, now);
  if (status.ok()) {
    fs::rename(partial, target, error);
    if (error) status = Failed(absl::StrCat("rename ", partial, " to ", target), error);
  }
  if (!status.ok()) {
    fs::remove_all(partial, error);
    return status;
  }
  return contents;
}

}  // namespace muster::coordinator
