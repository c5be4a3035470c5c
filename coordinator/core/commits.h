// What ranks say of checkpoints and evaluations.
#ifndef MUSTER_COORDINATOR_CORE_COMMITS_H_
#define MUSTER_COORDINATOR_CORE_COMMITS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "muster/v1/session.pb.h"

namespace muster::coordinator {

// Nothing else changes JobEntry.checkpoints and StateRow.last_committed_step. Only the current
// membership of the current attempt commits. Thread: the core's. What it is made of outlives it.
class Commits {
 public:
  Commits(JobTable& jobs, Scheduling& scheduling) : jobs_(jobs), scheduling_(scheduling) {}

  // Answers the worker. The job, if it has committed a later step by that, else null. Requires: the
  // worker has a session.
  JobEntry* Commit(const WorkerEntry& worker, const v1::CheckpointCommit& commit, Turn& turn);
  // What does not concern the job or come from a rank of it changes nothing.
  void Notice(const WorkerEntry& worker, const v1::RankNotice& notice, Turn& turn);
  // An evaluation of the current attempt, which may be known.
  static void Evaluated(JobEntry& job, int64_t step, double loss, Turn& turn);

 private:
  absl::Status Accept(const WorkerEntry& worker, const v1::CheckpointCommit& commit, Turn& turn);
  void UpdateCommitted(JobEntry& job);

  JobTable& jobs_;
  Scheduling& scheduling_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_COMMITS_H_
