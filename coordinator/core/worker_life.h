// The sessions of workers, and what their silence leads to.
#ifndef MUSTER_COORDINATOR_CORE_WORKER_LIFE_H_
#define MUSTER_COORDINATOR_CORE_WORKER_LIFE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/core/attempts.h"
#include "coordinator/core/core.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/identity.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/key_value.h"
#include "coordinator/core/reachability.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"

namespace muster::coordinator {

// Nothing else changes Worker.state, what a Hello says of a worker, and when it was last heard. A
// worker has one session at most, of its newest incarnation; one that is not lost has a deadline at
// which its silence is looked at. Thread: the core's. What it is made of outlives it.
class WorkerLife {
 public:
  WorkerLife(const CoreConfig& config, const Identity& identity, JobTable& jobs,
             WorkerTable& workers, const Scheduling& scheduling, KeyValue& values,
             Deadlines& deadlines, Attempts& attempts)
      : config_(config),
        identity_(identity),
        jobs_(jobs),
        workers_(workers),
        scheduling_(scheduling),
        values_(values),
        deadlines_(deadlines),
        attempts_(attempts),
        reachability_(config) {}

  // After a restart: every worker that is not lost is due to be looked at.
  void Recover(absl::Time now);
  // To be called first in every turn.
  void Observe(absl::Time now) { reachability_.Observe(workers_, now); }
  // The coordinator did not run for `away`.
  void ForgivePause(absl::Duration away, absl::Time now);

  // The worker of a Hello, whose report is not applied yet; null: the session is refused.
  WorkerEntry* Open(const SessionOpened& event, Turn& turn);
  // The worker that has sent the message; null: the session is closed, or was before.
  WorkerEntry* Receive(const SessionMessage& event, Turn& turn);
  void Closed(const SessionClosed& event, Turn& turn);

  // Acts on its silence, if it is silent.
  void Check(WorkerEntry& worker, Turn& turn);
  // Gives up all that it holds. Requires: it is not lost.
  void Lose(WorkerEntry& worker, const std::string& why, Turn& turn);
  // Requires: it is lost and holds nothing. The entry is gone.
  void Forget(WorkerEntry& worker, const std::string& why, Turn& turn);

  // Adds what differs from the table.
  void CheckIndex(std::vector<std::string>& broken) const { reachability_.Check(workers_, broken); }

 private:
  absl::Status CheckHello(const SessionOpened& event) const;
  void Join(WorkerEntry& worker, const SessionOpened& event, bool known, Turn& turn);
  void Heard(WorkerEntry& worker, Turn& turn);
  void Keep(WorkerEntry& worker, const std::string& why, Turn& turn);
  void Close(WorkerEntry& worker, const std::string& why, Turn& turn);

  const CoreConfig& config_;
  const Identity& identity_;
  JobTable& jobs_;
  WorkerTable& workers_;
  const Scheduling& scheduling_;
  KeyValue& values_;
  Deadlines& deadlines_;
  Attempts& attempts_;
  Reachability reachability_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_WORKER_LIFE_H_
