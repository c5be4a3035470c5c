// Brings a store that an older coordinator wrote to the current schema.
#ifndef MUSTER_COORDINATOR_CORE_MIGRATE_H_
#define MUSTER_COORDINATOR_CORE_MIGRATE_H_

#include "absl/status/status.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {

// Does nothing when the store has the current schema. Each job moves in one batch, so that a
// coordinator that ends in between goes on at its next start. kDataLoss names the row that cannot
// be read.
//
// Schema 1 kept a job, its attempts and its checkpoints in one row (JobRecord); 1 and 2 had no log
// of changes (state_log.h). Of 3 every row can be read: the number tells coordinators of versions
// that know no memberships, shares of devices and histories to leave the store alone, and those who
// wrote 3 may have had none of these.
absl::Status Migrate(Store& store);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_MIGRATE_H_
