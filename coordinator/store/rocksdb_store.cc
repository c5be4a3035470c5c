// The store in RocksDB, and the only file that includes it. Each Table is a column family; every
// Write is one synced WriteBatch, so that several transitions share one fsync (group commit).
#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/utilities/checkpoint.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdarg>
#include <filesystem>
#include <map>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {
namespace {

constexpr size_t kTables = static_cast<size_t>(Table::kTableCount);
constexpr size_t kGroupBytesKept = 4 << 20;

absl::Status FromRocksDb(const rocksdb::Status& status, const std::string& directory) {
  if (status.ok()) return absl::OkStatus();
  const std::string message = absl::StrCat("store ", directory, ": ", status.ToString());
  if (status.IsCorruption()) return absl::DataLossError(message);
  return absl::UnavailableError(message);
}

class RocksDbStore : public Store {
 public:
  RocksDbStore(std::string directory, std::unique_ptr<rocksdb::DB> db,
               std::vector<rocksdb::ColumnFamilyHandle*> handles)
      : directory_(std::move(directory)), db_(std::move(db)), handles_(std::move(handles)) {
    for (rocksdb::ColumnFamilyHandle* handle : handles_) {
      for (size_t i = 0; i < kTables; ++i) {
        if (handle->GetName() == Name(static_cast<Table>(i))) tables_[i] = handle;
      }
    }
  }

  ~RocksDbStore() override {
    for (rocksdb::ColumnFamilyHandle* handle : handles_) {
      db_->DestroyColumnFamilyHandle(handle);
    }
  }

  absl::Status Write(const std::vector<Batch>& batches) override {
    if (broken_) {
      return absl::UnavailableError(
          absl::StrCat("store ", directory_, ": an earlier write failed; restart the coordinator"));
    }
    group_.Clear();
    // Every turn has the numbers of the newest rows; of a group they are written once.
    std::map<absl::string_view, const Batch::Change*> numbers;
    for (const Batch& batch : batches) {
      for (const Batch::Change& change : batch.changes) {
        if (change.table == Table::kMeta) {
          numbers[change.key] = &change;
        } else if (const rocksdb::Status added = AddToGroup(change); !added.ok()) {
          return Break(added);
        }
      }
    }
    for (const auto& [key, change] : numbers) {
      if (const rocksdb::Status added = AddToGroup(*change); !added.ok()) return Break(added);
    }
    rocksdb::WriteOptions options;
    options.sync = true;
    const rocksdb::Status written = db_->Write(options, &group_);
    if (group_.GetDataSize() > kGroupBytesKept) group_ = rocksdb::WriteBatch();
    return written.ok() ? absl::OkStatus() : Break(written);
  }

  absl::StatusOr<std::optional<std::string>> Get(Table table, const std::string& key) override {
    if (HandleOf(table) == nullptr) return std::optional<std::string>();
    std::string value;
    const rocksdb::Status status = db_->Get(rocksdb::ReadOptions(), HandleOf(table), key, &value);
    if (status.IsNotFound()) return std::optional<std::string>();
    RETURN_IF_ERROR(FromRocksDb(status, directory_));
    return std::optional<std::string>(std::move(value));
  }

  absl::Status Scan(
      Table table, const std::string& begin, const std::string& end,
      absl::AnyInvocable<bool(const std::string& key, const std::string& value)> visit) override {
    if (HandleOf(table) == nullptr) return absl::OkStatus();
    rocksdb::ReadOptions options;
    const rocksdb::Slice bound(end);
    if (!end.empty()) options.iterate_upper_bound = &bound;
    const std::unique_ptr<rocksdb::Iterator> row(db_->NewIterator(options, HandleOf(table)));
    for (row->Seek(begin); row->Valid(); row->Next()) {
      if (!visit(row->key().ToString(), row->value().ToString())) break;
    }
    return FromRocksDb(row->status(), directory_);
  }

  absl::Status Backup(const std::string& directory) override {
    rocksdb::Checkpoint* checkpoint = nullptr;
    rocksdb::Status status = rocksdb::Checkpoint::Create(db_.get(), &checkpoint);
    const std::unique_ptr<rocksdb::Checkpoint> owned(checkpoint);
    if (status.ok()) status = owned->CreateCheckpoint(directory);
    if (status.ok()) return absl::OkStatus();
    return absl::UnavailableError(absl::StrCat("store ", directory_, ": cannot write a backup to ",
                                               directory, ": ", status.ToString()));
  }

  // Writes the identity of a new store, or checks that of an existing one.
  absl::Status Identify(const std::string& expected_cluster_id, const std::string& new_cluster_id) {
    ASSIGN_OR_RETURN(const std::optional<std::string> version,
                     Get(Table::kMeta, kMetaSchemaVersion));
    ASSIGN_OR_RETURN(const std::optional<std::string> cluster, Get(Table::kMeta, kMetaClusterId));
    if (!version.has_value() && !cluster.has_value()) {
      Batch identity;
      identity.Put(Table::kMeta, kMetaSchemaVersion, absl::StrCat(kSchemaVersion));
      identity.Put(Table::kMeta, kMetaClusterId,
                   expected_cluster_id.empty() ? new_cluster_id : expected_cluster_id);
      return Write({identity});
    }
    uint32_t found = 0;
    if (!version.has_value() || !cluster.has_value() || !absl::SimpleAtoi(*version, &found)) {
      return absl::DataLossError(absl::StrCat("store ", directory_,
                                              ": no readable schema version and cluster id; "
                                              "restore it from a backup"));
    }
    if (found > kSchemaVersion) {
      return absl::FailedPreconditionError(absl::StrCat(
          "store ", directory_, ": written with schema ", found, ", this coordinator reads up to ",
          kSchemaVersion, "; start the newer version of muster-coordinator"));
    }
    if (!expected_cluster_id.empty() && *cluster != expected_cluster_id) {
      return absl::FailedPreconditionError(
          absl::StrCat("store ", directory_, ": belongs to cluster ", *cluster, ", not to ",
                       expected_cluster_id, "; check --data-dir and --cluster-id"));
    }
    return absl::OkStatus();
  }

 private:
  // Null for a table that an older schema lacks, in a store that is open for reading only.
  rocksdb::ColumnFamilyHandle* HandleOf(Table table) const {
    return tables_[static_cast<size_t>(table)];
  }

  rocksdb::Status AddToGroup(const Batch::Change& change) {
    return change.value.has_value() ? group_.Put(HandleOf(change.table), change.key, *change.value)
                                    : group_.Delete(HandleOf(change.table), change.key);
  }

  absl::Status Break(const rocksdb::Status& status) {
    broken_ = true;
    return absl::UnavailableError(
        absl::StrCat("store ", directory_, ": cannot write: ", status.ToString()));
  }

  const std::string directory_;
  const std::unique_ptr<rocksdb::DB> db_;
  const std::vector<rocksdb::ColumnFamilyHandle*> handles_;  // freed before db_
  std::array<rocksdb::ColumnFamilyHandle*, kTables> tables_ = {};
  // RocksDB can resume after some errors, but nobody knows whether the failed write is durable: the
  // process has to end and recover.
  std::atomic<bool> broken_ = false;
  // What Write() is writing. Kept between its calls, since a buffer of this size would be taken
  // from the kernel and given back each time.
  rocksdb::WriteBatch group_;
};

// Turns RocksDB's own log off: on a full disk its file logger fails an assertion and ends the
// process before the failed write is reported. Errors come back as a Status anyway.
class NoLog : public rocksdb::Logger {
 public:
  using rocksdb::Logger::Logv;
  void Logv(const char*, va_list) override {}
};

rocksdb::DBOptions DatabaseOptions() {
  rocksdb::DBOptions options;
  options.create_if_missing = true;
  options.create_missing_column_families = true;
  options.paranoid_checks = true;
  // An incomplete last record was never acknowledged and is dropped; any other damage is an error.
  options.wal_recovery_mode = rocksdb::WALRecoveryMode::kTolerateCorruptedTailRecords;
  // These bound the time of recovery, which reads some 60 MB of log a second into memory. What it
  // has read stays there instead of being written to tables before the coordinator serves.
  options.max_total_wal_size = 12 << 20;
  options.avoid_flush_during_recovery = true;
  options.max_background_jobs = 2;
  options.info_log = std::make_shared<NoLog>();
  return options;
}

// All column families have to be opened, and a newer schema may have more of them: its version must
// still be readable. An older one has fewer; where nothing may be written, they stay absent.
std::vector<rocksdb::ColumnFamilyDescriptor> Families(const rocksdb::DBOptions& options,
                                                      const std::string& directory) {
  std::vector<std::string> names;
  const bool exists = rocksdb::DB::ListColumnFamilies(options, directory, &names).ok();
  if (!exists) names.clear();
  for (size_t i = 0; i < kTables && (options.create_missing_column_families || !exists); ++i) {
    names.push_back(Name(static_cast<Table>(i)));
  }
  names.push_back(rocksdb::kDefaultColumnFamilyName);
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  rocksdb::ColumnFamilyOptions family;
  family.write_buffer_size = 16 << 20;
  std::vector<rocksdb::ColumnFamilyDescriptor> families;
  for (const std::string& name : names) families.emplace_back(name, family);
  return families;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> OpenRocksDbStore(const std::string& directory,
                                                        const std::string& expected_cluster_id,
                                                        const std::string& new_cluster_id) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (error) {
    return absl::UnavailableError(
        absl::StrCat("store ", directory, ": cannot create the directory: ", error.message()));
  }
  const rocksdb::DBOptions options = DatabaseOptions();
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* opened = nullptr;
  const rocksdb::Status status =
      rocksdb::DB::Open(options, directory, Families(options, directory), &handles, &opened);
  if (!status.ok()) {
    if (status.IsIOError() && absl::StrContains(status.ToString(), "lock")) {
      return absl::UnavailableError(absl::StrCat(
          "store ", directory, ": in use by a running coordinator (", status.ToString(), ")"));
    }
    return FromRocksDb(status, directory);
  }
  auto store = std::make_unique<RocksDbStore>(directory, std::unique_ptr<rocksdb::DB>(opened),
                                              std::move(handles));
  RETURN_IF_ERROR(store->Identify(expected_cluster_id, new_cluster_id));
  return std::unique_ptr<Store>(std::move(store));
}

absl::StatusOr<std::unique_ptr<Store>> OpenRocksDbStoreForReading(const std::string& directory) {
  std::error_code error;
  if (!std::filesystem::exists(directory + "/CURRENT", error)) {
    return absl::NotFoundError(
        absl::StrCat(directory, " holds no store of a coordinator: it has no file CURRENT"));
  }
  rocksdb::DBOptions options = DatabaseOptions();
  options.create_if_missing = options.create_missing_column_families = false;
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* opened = nullptr;
  RETURN_IF_ERROR(
      FromRocksDb(rocksdb::DB::OpenForReadOnly(options, directory, Families(options, directory),
                                               &handles, &opened),
                  directory));
  auto store = std::make_unique<RocksDbStore>(directory, std::unique_ptr<rocksdb::DB>(opened),
                                              std::move(handles));
  RETURN_IF_ERROR(store->Identify("", ""));
  return std::unique_ptr<Store>(std::move(store));
}

}  // namespace muster::coordinator
