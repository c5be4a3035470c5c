// The log of all changes to what is stored of jobs, workers and tokens: the state is the fold of
// its entries, in order of index. It serves replay, and followers of the coordinator.
//
// Not in it: progress and points of loss curves, which ranks report again and again; the event
// log and the audit log, which tell people what happened; the numbers in kMeta.
#ifndef MUSTER_COORDINATOR_CORE_STATE_LOG_H_
#define MUSTER_COORDINATOR_CORE_STATE_LOG_H_

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/store/store.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// Whether the rows of this table are the fold of the log.
bool IsLogged(Table table);

// Numbers the entries. Value type.
class StateLog {
 public:
  uint64_t last_index() const { return last_; }
  void set_term(uint64_t term) { term_ = term; }
  void Recover(uint64_t last_index) { last_ = last_index; }

  // Adds an entry with the changes in `batch`, those of logged tables, to the batch; none where
  // there are none. Of several changes of one row the last counts.
  // `with`: what the entry has beside changes, if anything; there is one in any case then.
  void Append(absl::Time now, const std::string& actor, uint64_t last_event, Batch& batch,
              v1::LogEntry with = {});

 private:
  uint64_t term_ = 0;
  uint64_t last_ = 0;
};

// Shows the entries behind index `after`, in their order, until `visit` returns an error, which is
// returned, or false. A follower that folds them and calls again with the last index that it saw
// has the state of every moment, while the coordinator writes on (Store::Scan). kOutOfRange:
// entries behind `after` are not kept any more. kDataLoss: one cannot be read.
absl::Status Tail(Store& store, uint64_t after,
                  absl::FunctionRef<absl::StatusOr<bool>(const v1::LogEntry& entry)> visit);

// Rows of logged tables.
using LoggedRows = std::map<std::pair<Table, std::string>, std::string>;

// Applies an entry. kDataLoss: it is not the next one behind `index`, or names an unknown table.
// Indices leap where a state was restored from a backup.
absl::Status Fold(const v1::LogEntry& entry, uint64_t& index, LoggedRows& rows);

// What a replay found.
struct Replayed {
  uint64_t first_index = 0, last_index = 0;  // of the entries folded
  int64_t entries = 0;
  LoggedRows rows;
  // Rows, by table and key, that the store has otherwise; at most kDifferencesMax are named. Not
  // compared when the fold ended early.
  std::vector<std::string> differences;
};
constexpr size_t kDifferencesMax = 10;

// The rows of a store as they are, and the index up to which they are the fold.
absl::StatusOr<std::pair<LoggedRows, uint64_t>> ReadLogged(Store& store);
class DecisionReplay;  // decision_replay.h
// Folds the log of `store` up to the entry `until` (0 = all), from nothing, or from the rows of
// `base`, an earlier copy of the same state. `decisions`, if any, is shown every entry.
// kOutOfRange: the entries behind the beginning are not kept any more. kDataLoss: the log cannot be
// read.
absl::StatusOr<Replayed> Replay(Store& store, Store* base, uint64_t until,
                                DecisionReplay* decisions = nullptr);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_STATE_LOG_H_
