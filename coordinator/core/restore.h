// Backups of the durable state: reading one through, and making a restored copy safe to serve from.
#ifndef MUSTER_COORDINATOR_CORE_RESTORE_H_
#define MUSTER_COORDINATOR_CORE_RESTORE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/rng.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {

// What a store holds.
struct StoreContents {
  std::string cluster_id;
  std::string history_id;  // empty: no coordinator that draws one has opened it
  uint64_t leader_term = 0;
  uint64_t last_event = 0;
  int64_t jobs = 0;
  int64_t live_jobs = 0;
  int64_t workers = 0;
  int64_t events = 0;
  int64_t log_entries = 0;
};

// Reads every row, its checksums included. kDataLoss names the first row that cannot be read.
absl::StatusOr<StoreContents> Verify(Store& store);

// A history id (FromCoordinator.history_id): 32 hex digits.
std::string NewHistoryId(Rng& rng);

// Makes a copy of an older state safe to serve from, though the cluster went on after it was
// written, and though other copies of it may have been restored before: it begins a history of its
// own, drawn from `rng`. The leader term leaps above every one that daemons have obeyed since, no
// epoch and no event number is used twice, and attempts that were being placed are ended, since
// their epoch may have run to its end. Attempts that trained go on where daemons still hold them.
// To be called once per restored copy, before a coordinator opens it.
//
// Terms, epochs and events leap to numbers made of `now`. Of two restores of one backup the later
// one has the higher ones if its clock says so, to the millisecond; where it does not, daemons
// refuse its leader term.
absl::Status MarkRestored(Store& store, Rng& rng, absl::Time now);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_RESTORE_H_
