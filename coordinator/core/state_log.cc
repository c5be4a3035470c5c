#include "coordinator/core/state_log.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/decision_replay.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// "states 'gpt-abcde'".
std::string RowName(const std::pair<Table, std::string>& row) {
  return absl::StrCat(Name(row.first), " '", absl::CHexEscape(row.second), "'");
}

void Compare(const LoggedRows& folded, const LoggedRows& stored,
             std::vector<std::string>& differences) {
  const auto differs = [&differences](const auto& row, const char* how) {
    if (differences.size() < kDifferencesMax) {
      differences.push_back(absl::StrCat(RowName(row.first), " ", how));
    }
  };
  for (const auto& row : folded) {
    const auto twin = stored.find(row.first);
    if (twin == stored.end()) {
      differs(row, "is not stored");
    } else if (twin->second != row.second) {
      differs(row, "is stored otherwise");
    }
  }
  for (const auto& row : stored) {
    if (!folded.contains(row.first)) differs(row, "is stored, and not in the log");
  }
}

}  // namespace

bool IsLogged(Table table) {
  switch (table) {
    case Table::kSpecs:
    case Table::kStates:
    case Table::kAttempts:
    case Table::kEnds:
    case Table::kCheckpoints:
    case Table::kWorkers:
    case Table::kRequests:
    case Table::kKeyValue:
    case Table::kUsage:
    case Table::kTokens:
    case Table::kQueues:
      return true;
    case Table::kMeta:
    case Table::kJobs:
    case Table::kEvents:
    case Table::kProgress:
    case Table::kCurves:
    case Table::kLog:
    case Table::kAudit:
    case Table::kTableCount:
      return false;
  }
  return false;
}

void StateLog::Append(absl::Time now, const std::string& actor, uint64_t last_event, Batch& batch,
                      v1::LogEntry with) {
  std::vector<Batch::Change*> changes;
  for (Batch::Change& change : batch.changes) {
    if (IsLogged(change.table)) changes.push_back(&change);
  }
  const auto row = [](const Batch::Change* change) { return std::tie(change->table, change->key); };
  std::stable_sort(changes.begin(), changes.end(),
                   [&row](const auto* a, const auto* b) { return row(a) < row(b); });
  // Of equal rows the last is the first from behind.
  const auto kept = std::unique(changes.rbegin(), changes.rend(),
                                [&row](const auto* a, const auto* b) { return row(a) == row(b); });
  changes.erase(changes.begin(), kept.base());
  v1::LogEntry entry = std::move(with);
  if (changes.empty() && entry.ByteSizeLong() == 0) return;
  entry.set_index(++last_);
  entry.set_term(term_);
  *entry.mutable_time() = ToProto(now);
  entry.set_actor(actor);
  entry.set_last_event(last_event);
  // The entry borrows the values while it is written: they are most of what a turn writes.
  for (Batch::Change* change : changes) {
    v1::RowChange& changed = *entry.add_changes();
    changed.set_table(Name(change->table));
    changed.set_key(change->key);
    if (change->value.has_value()) changed.mutable_value()->swap(*change->value);
  }
  std::string written = schema::Serialize(entry);
  for (size_t i = 0; i < changes.size(); ++i) {
    v1::RowChange& changed = *entry.mutable_changes(static_cast<int>(i));
    if (changed.has_value()) changed.mutable_value()->swap(*changes[i]->value);
  }
  batch.Put(Table::kLog, schema::EncodeU64(last_), std::move(written));
  if (last_ > kLogEntriesMax) {
    batch.Delete(Table::kLog, schema::EncodeU64(last_ - kLogEntriesMax));
  }
  batch.Put(Table::kMeta, schema::kLastLogEntry, schema::EncodeU64(last_));
}

absl::Status Fold(const v1::LogEntry& entry, uint64_t& index, LoggedRows& rows) {
  if (entry.index() != index + 1 && !entry.restored()) {
    return absl::DataLossError(
        absl::StrCat("entry ", entry.index(), " of the state's log does not follow ", index));
  }
  for (const v1::RowChange& change : entry.changes()) {
    const std::optional<Table> table = TableNamed(change.table());
    if (!table.has_value() || !IsLogged(*table)) {
      return absl::DataLossError(absl::StrCat("entry ", entry.index(), " of the state's log names ",
                                              "the unknown table '", change.table(), "'"));
    }
    if (change.has_value()) {
      rows[{*table, change.key()}] = change.value();
    } else {
      rows.erase({*table, change.key()});
    }
  }
  index = entry.index();
  return absl::OkStatus();
}

absl::Status Tail(Store& store, uint64_t after,
                  absl::FunctionRef<absl::StatusOr<bool>(const v1::LogEntry& entry)> visit) {
  absl::Status status;
  bool first = true;
  RETURN_IF_ERROR(store.Scan(
      Table::kLog, schema::EncodeU64(after + 1), "",
      [&](const std::string& key, const std::string& value) {
        v1::LogEntry entry;
        status = schema::Parse(Table::kLog, key, value, entry);
        if (status.ok() && std::exchange(first, false) && entry.index() != after + 1 &&
            !entry.restored()) {
          status = absl::OutOfRangeError(absl::StrCat(
              "the log begins with entry ", entry.index(), "; those from ", after + 1,
              " on are not kept any more: replay from a snapshot that has them in its state"));
        }
        if (!status.ok()) return false;
        const absl::StatusOr<bool> more = visit(entry);
        status = more.status();
        return status.ok() && *more;
      }));
  return status;
}

absl::StatusOr<std::pair<LoggedRows, uint64_t>> ReadLogged(Store& store) {
  LoggedRows rows;
  for (size_t i = 0; i < static_cast<size_t>(Table::kTableCount); ++i) {
    const Table table = static_cast<Table>(i);
    if (!IsLogged(table)) continue;
    RETURN_IF_ERROR(
        store.Scan(table, "", "", [&](const std::string& key, const std::string& value) {
          rows[{table, key}] = value;
          return true;
        }));
  }
  uint64_t last = 0;
  ASSIGN_OR_RETURN(const auto stored, store.Get(Table::kMeta, schema::kLastLogEntry));
  if (stored.has_value()) {
    ASSIGN_OR_RETURN(last, schema::DecodeU64(*stored));
  }
  return std::make_pair(std::move(rows), last);
}

absl::StatusOr<Replayed> Replay(Store& store, Store* base, uint64_t until,
                                DecisionReplay* decisions) {
  Replayed out;
  uint64_t index = 0;
  if (base != nullptr) {
    ASSIGN_OR_RETURN(std::tie(out.rows, index), ReadLogged(*base));
    if (decisions != nullptr) RETURN_IF_ERROR(decisions->Begin(*base, out.rows));
  }
  bool early = false;
  RETURN_IF_ERROR(Tail(store, index, [&](const v1::LogEntry& entry) -> absl::StatusOr<bool> {
    early = until != 0 && entry.index() > until;
    if (early) return false;
    RETURN_IF_ERROR(Fold(entry, index, out.rows));
    if (decisions != nullptr) RETURN_IF_ERROR(decisions->Take(entry, out.rows));
    if (out.entries++ == 0) out.first_index = entry.index();
    out.last_index = entry.index();
    return true;
  }));
  if (early) return out;
  ASSIGN_OR_RETURN(const auto stored, ReadLogged(store));
  if (out.entries == 0) out.last_index = index;
  if (stored.second != index) {
    return absl::DataLossError(
        absl::StrCat("the log ends with entry ", index, ", the state with ", stored.second));
  }
  Compare(out.rows, stored.first, out.differences);
  return out;
}

}  // namespace muster::coordinator
