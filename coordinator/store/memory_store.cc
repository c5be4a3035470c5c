#include <array>
#include <cstdint>
#include <map>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/mutex.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {
namespace {

class MemoryStoreImpl : public MemoryStore {
 public:
  explicit MemoryStoreImpl(const std::string& cluster_id) {
    RowsOf(Table::kMeta)[kMetaClusterId] = cluster_id;
    RowsOf(Table::kMeta)[kMetaSchemaVersion] = absl::StrCat(kSchemaVersion);
  }

  absl::Status Write(const std::vector<Batch>& batches) override {
    MutexLock lock(&mutex_);
    if (failing_ || broken_) return Refuse();
    for (const Batch& batch : batches) Apply(batch);
    undo_.clear();
    return absl::OkStatus();
  }

  absl::Status WriteUnsynced(const std::vector<Batch>& batches) override {
    MutexLock lock(&mutex_);
    if (failing_ || broken_) return Refuse();
    for (const Batch& batch : batches) Apply(batch);
    return absl::OkStatus();
  }

  void Sync() override {
    MutexLock lock(&mutex_);
    undo_.clear();
  }

  void Crash() override {
    MutexLock lock(&mutex_);
    for (auto change = undo_.rbegin(); change != undo_.rend(); ++change) {
      if (change->value.has_value()) {
        RowsOf(change->table)[change->key] = *std::move(change->value);
      } else {
        RowsOf(change->table).erase(change->key);
        ++erasures_;
      }
    }
    undo_.clear();
    broken_ = false;
  }

  absl::Status Backup(const std::string& directory) override {
    return absl::UnimplementedError("a store in memory has no files");
  }

  std::unique_ptr<MemoryStore> Copy() override {
    auto copy = std::make_unique<MemoryStoreImpl>("");
    MutexLock lock(&mutex_);
    CHECK(undo_.empty()) << "a copy of rows that are not durable";
    MutexLock other(&copy->mutex_);
    copy->tables_ = tables_;
    return copy;
  }

  void FailWrites(bool fail) override {
    MutexLock lock(&mutex_);
    failing_ = fail;
  }

  absl::StatusOr<std::optional<std::string>> Get(Table table, const std::string& key) override {
    MutexLock lock(&mutex_);
    const auto found = RowsOf(table).find(key);
    if (found == RowsOf(table).end()) return std::optional<std::string>();
    return std::optional<std::string>(found->second);
  }

  absl::Status Scan(
      Table table, const std::string& begin, const std::string& end,
      absl::AnyInvocable<bool(const std::string& key, const std::string& value)> visit) override {
    std::string key = begin;
    Rows::iterator row;
    std::optional<uint64_t> erasures;  // as of `row`, which is valid while there were no more
    while (true) {
      std::string value;
      {
        // One row at a time, so that `visit` may use the store.
        MutexLock lock(&mutex_);
        Rows& rows = RowsOf(table);
        if (!erasures.has_value()) {
          row = rows.lower_bound(key);
        } else if (*erasures == erasures_) {
          ++row;
        } else {
          row = rows.upper_bound(key);
        }
        erasures = erasures_;
        if (row == rows.end() || (!end.empty() && row->first >= end)) return absl::OkStatus();
        key = row->first;
        value = row->second;
      }
      if (!visit(key, value)) return absl::OkStatus();
    }
  }

 private:
  using Rows = std::map<std::string, std::string>;

  Rows& RowsOf(Table table) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return tables_[static_cast<size_t>(table)];
  }

  absl::Status Refuse() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    broken_ = true;
    return absl::UnavailableError("memory store: writes fail; it refuses every later one");
  }

  void Apply(const Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (const Batch::Change& change : batch.changes) {
      Rows& rows = RowsOf(change.table);
      const auto row = rows.find(change.key);
      undo_.push_back({change.table, change.key,
                       row == rows.end() ? std::nullopt : std::make_optional(row->second)});
      if (change.value.has_value()) {
        rows[change.key] = *change.value;
      } else if (row != rows.end()) {
        rows.erase(row);
        ++erasures_;
      }
    }
  }

  Mutex mutex_;
  std::array<Rows, static_cast<size_t>(Table::kTableCount)> tables_ ABSL_GUARDED_BY(mutex_);
  uint64_t erasures_ ABSL_GUARDED_BY(mutex_) = 0;
  // The values that unsynced changes replaced, oldest first, which Crash() puts back.
  std::vector<Batch::Change> undo_ ABSL_GUARDED_BY(mutex_);
  bool failing_ ABSL_GUARDED_BY(mutex_) = false;
  bool broken_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace

std::unique_ptr<MemoryStore> MemoryStore::Make(const std::string& cluster_id) {
  return std::make_unique<MemoryStoreImpl>(cluster_id);
}

}  // namespace muster::coordinator
