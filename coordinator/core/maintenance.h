// Workers that get no new ranks, or lose those that they have, since an operator wants it: cordon
// and drain.
#ifndef MUSTER_COORDINATOR_CORE_MAINTENANCE_H_
#define MUSTER_COORDINATOR_CORE_MAINTENANCE_H_

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/ids.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

// Nothing else changes Worker.cordon. A worker that is drained is among those that are looked at
// until it is known to hold no slot, also after a restart; one with a rank that trains has a
// deadline by then. Thread: the core's.
class Maintenance {
 public:
  // What an operator said of it.
  struct Order {
    std::string actor;
    std::string reason;  // may be empty
  };
  // The attempt of the job is to be stopped for maintenance.
  struct Move {
    JobId job;
    std::string why;
  };

  // After a restart: every worker that is being drained is due to be checked.
  void Recover(const WorkerTable& workers, Deadlines& deadlines, absl::Time now);

  // Nothing changes for a worker that is cordoned or drained.
  static void Cordon(WorkerEntry& worker, const Order& order, WorkerTable& workers, Turn& turn);
  // Ends a cordon or a drain.
  void Uncordon(WorkerEntry& worker, WorkerTable& workers, Deadlines& deadlines, Turn& turn);
  // The worker is to lose its ranks within `timeout`; the order of one that is drained already may
  // only bring the end nearer. True: it is to be checked (Check).
  bool Drain(WorkerEntry& worker, absl::Duration timeout, const Order& order, WorkerTable& workers,
             Turn& turn);

  // Those attempts with ranks on the worker that need not or may not train on. Notes that it is
  // drained when it holds no slot.
  std::vector<Move> Check(WorkerEntry& worker, const JobTable& jobs, Deadlines& deadlines,
                          Turn& turn);
  // Notes which of the workers that are being drained hold no slot any more.
  void NoteDrained(WorkerTable& workers, Deadlines& deadlines, Turn& turn);
  // For a job that has committed a checkpoint: whether it moves, since it has ranks on a worker
  // that is being drained.
  std::optional<Move> AfterCheckpoint(const JobEntry& job) const;

 private:
  void Drained(WorkerEntry& worker, Deadlines& deadlines, Turn& turn);

  std::set<WorkerId> draining_;  // and not drained yet
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_MAINTENANCE_H_
