// The coordinator's durable state: an ordered map of keys to values with atomic batches.
#ifndef MUSTER_COORDINATOR_STORE_STORE_H_
#define MUSTER_COORDINATOR_STORE_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::coordinator {

// Column families. Key formats are in core/schema.h.
enum class Table : uint8_t {
  kMeta,         // cluster id, schema version, leader term
  kJobs,         // job id -> JobRecord; empty since schema 2
  kEvents,       // sequence (big endian) -> Event
  kWorkers,      // name -> Worker
  kKeyValue,     // (job, epoch, key) -> bytes
  kRequests,     // request id -> job id
  kSpecs,        // job id -> SpecRow
  kStates,       // job id -> StateRow
  kProgress,     // job id -> ProgressRow
  kAttempts,     // (job, epoch) -> AttemptRow
  kEnds,         // (job, epoch) -> AttemptEnd
  kCheckpoints,  // (job, epoch, step) -> CheckpointRecord
  kCurves,       // (job, step) -> LossPoint
  kLog,          // index (big endian) -> LogEntry
  kUsage,        // "fleet" -> FleetAccount, sequence (big endian) -> UsageRow
  kTokens,       // id -> TokenRow
  kAudit,        // sequence (big endian) -> AuditEntry
  kQueues,       // "policy" -> QueuePolicy
  kTableCount,
};
const char* Name(Table table);
// No value: no table has this name.
std::optional<Table> TableNamed(const std::string& name);

// One atomic change. Later entries win over earlier ones for the same key.
struct Batch {
  struct Change {
    Table table;
    std::string key;
    std::optional<std::string> value;  // absent = delete
  };
  std::vector<Change> changes;

  void Put(Table table, std::string key, std::string value) {
    changes.push_back({table, std::move(key), std::move(value)});
  }
  void Delete(Table table, std::string key) {
    changes.push_back({table, std::move(key), std::nullopt});
  }
  bool empty() const { return changes.empty(); }
};

// Write is called from one thread; Scan and Get from any.
class Store {
 public:
  virtual ~Store() = default;
  // Applies the batches in order, each atomically, and syncs once at the end (group commit). OK:
  // all are durable. kUnavailable: each of them may or may not be durable, and the store refuses
  // every later write.
  virtual absl::Status Write(const std::vector<Batch>& batches) = 0;
  virtual absl::StatusOr<std::optional<std::string>> Get(Table table, const std::string& key) = 0;
  // In key order from `begin` (inclusive) to `end` (exclusive, empty = no bound), until `visit`
  // returns false. kDataLoss: a row cannot be read.
  virtual absl::Status Scan(
      Table table, const std::string& begin, const std::string& end,
      absl::AnyInvocable<bool(const std::string& key, const std::string& value)> visit) = 0;
  // Writes a consistent copy, which OpenRocksDbStore can open, to `directory`, which must not
  // exist; files are linked where that is possible. From any thread, also during Write.
  // kUnimplemented: the store is in memory. kUnavailable: I/O error, names the path.
  virtual absl::Status Backup(const std::string& directory) = 0;
};

// The identity of a store: these rows of kMeta, as text, are written before any other row.
constexpr uint32_t kSchemaVersion = 4;
constexpr uint32_t kFirstSchemaWithLog = 3;  // Table::kLog
constexpr char kMetaSchemaVersion[] = "schema_version";
constexpr char kMetaClusterId[] = "cluster_id";

// Opens or creates `directory`. A new one belongs to `expected_cluster_id`, or when that is empty
// to `new_cluster_id`. kFailedPrecondition: the directory belongs to another cluster than
// `expected_cluster_id` (when not empty), or was written by a newer schema. kUnavailable: locked by
// a running coordinator, or I/O error. kDataLoss: damaged. Each names the directory.
absl::StatusOr<std::unique_ptr<Store>> OpenRocksDbStore(const std::string& directory,
                                                        const std::string& expected_cluster_id,
                                                        const std::string& new_cluster_id);

// As OpenRocksDbStore, of an existing directory and without changing a byte of it: every Write
// fails. kNotFound: there is no store.
absl::StatusOr<std::unique_ptr<Store>> OpenRocksDbStoreForReading(const std::string& directory);

// In memory, for tests and simulation: a crash loses what was not synced.
class MemoryStore : public Store {
 public:
  ~MemoryStore() override = default;
  // The batches are visible at once, and durable with the next Write or Sync.
  virtual absl::Status WriteUnsynced(const std::vector<Batch>& batches) = 0;
  virtual void Sync() = 0;
  // Returns to the last synced state, as a new process would find it; writes work again.
  virtual void Crash() = 0;
  // While set, writes change nothing and fail; after one has failed, all do until Crash().
  virtual void FailWrites(bool fail) = 0;
  // Another store with the durable rows.
  virtual std::unique_ptr<MemoryStore> Copy() = 0;
  static std::unique_ptr<MemoryStore> Make(const std::string& cluster_id);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_STORE_STORE_H_
