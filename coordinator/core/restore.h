// Backups of the durable state: reading one through, and making a restored copy safe to serve from.
#ifndef MUSTER_COORDINATOR_CORE_RESTORE_H_
#define MUSTER_COORDINATOR_CORE_RESTORE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {

// What a store holds.
struct StoreContents {
  std::string cluster_id;
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

// Makes a copy of an older state safe to serve from, though the cluster went on after it was
// written: the leader term leaps above every one that daemons have obeyed since, no epoch and no
// event number is used twice, and attempts that were being placed are ended, since their epoch may
// have run to its end. Attempts that trained go on where daemons still hold them. To be called once
// per restored copy, before a coordinator opens it.
absl::Status MarkRestored(Store& store, absl::Time now);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_RESTORE_H_
