// The audit log: who called what, and with which result.
#ifndef MUSTER_COORDINATOR_CORE_AUDIT_LOG_H_
#define MUSTER_COORDINATOR_CORE_AUDIT_LOG_H_

#include <cstdint>

#include "absl/status/status.h"
#include "coordinator/core/caller.h"
#include "coordinator/core/turn.h"
#include "coordinator/store/store.h"
#include "muster/v1/access.pb.h"

namespace muster::coordinator {

// The numbers of entries have no gaps, grow over restarts, and the newest kAuditEntriesMax are
// kept. An entry is in the batch of the change that it is about. Thread: the core's.
class AuditLog {
 public:
  // kDataLoss: the newest number cannot be read.
  absl::Status Load(Store& store);
  // Appends the entry with its number and time.
  void Append(v1::AuditEntry entry, Turn& turn);
  // The entry of a call that the turn has answered. None for one that the log does not keep
  // (Caller::method).
  void Append(const Caller& caller, CallId call, Turn& turn);

 private:
  uint64_t last_ = 0;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_AUDIT_LOG_H_
