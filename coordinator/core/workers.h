// Who is in the cluster, over which stream it is reached, and who holds which of its slots.
#ifndef MUSTER_COORDINATOR_CORE_WORKERS_H_
#define MUSTER_COORDINATOR_CORE_WORKERS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "coordinator/core/core.h"
#include "coordinator/core/turn.h"
#include "coordinator/scheduler/scheduler.h"

namespace muster::coordinator {

// Who holds a slot: from the durable placement until its daemon proved the release (or is lost).
struct SlotHolder {
  JobId job;
  Epoch epoch;
  int32_t rank = 0;
};

struct WorkerEntry {
  v1::Worker row;  // durable, but for last_heard and the counts
  std::optional<SessionId> session;
  absl::Time last_heard;
  std::map<std::string, SlotHolder> held;  // by device

  // ---- of the current session
  v1::Desired desired;  // newest sent
  absl::Time desired_sent_at;
  // By job: since which revision its attempt is listed, and since which as STOPPED (0 = not yet).
  struct Listed {
    Epoch epoch;
    uint64_t since = 0;
    uint64_t stopped_since = 0;
  };
  std::map<JobId, Listed> listed;
  // It holds attempts that nobody wants there (given up, or from before). Until it reports that
  // they are gone none of its slots is trusted to be free.
  std::set<std::string> strangers;

  WorkerId id() const { return WorkerId(row.name()); }
  bool Ready() const {
    return row.state() == v1::WORKER_STATE_READY && session.has_value() && strangers.empty();
  }
  std::set<JobId> Jobs() const;
};

// Ordered by name. Bound: kWorkersMax.
class WorkerTable {
 public:
  WorkerEntry* Find(const WorkerId& id);
  const WorkerEntry* Find(const WorkerId& id) const;
  WorkerEntry* FindSession(SessionId session);
  // Makes the entry when it is new; kResourceExhausted when there are too many that are not lost.
  absl::StatusOr<WorkerEntry*> Add(const WorkerId& id, Batch& batch);
  void Recover(v1::Worker row, absl::Time now);

  void OpenSession(WorkerEntry& worker, SessionId session);
  void CloseSession(WorkerEntry& worker);

  void Hold(const v1::Placement& placement, const JobId& job, Epoch epoch);
  // Frees the slot if this attempt holds it.
  void Free(const v1::Placement& placement, const JobId& job, Epoch epoch);
  bool Holds(const v1::Placement& placement, const JobId& job, Epoch epoch) const;

  static void Persist(const WorkerEntry& worker, Turn& turn);
  // What the scheduler sees: all but lost workers. `name_of` a job that holds a slot.
  ClusterView View(absl::FunctionRef<std::string(const JobId&)> name_of) const;
  std::map<WorkerId, WorkerEntry>& entries() { return entries_; }
  const std::map<WorkerId, WorkerEntry>& entries() const { return entries_; }

 private:
  std::map<WorkerId, WorkerEntry> entries_;
  std::map<SessionId, WorkerId> sessions_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_WORKERS_H_
