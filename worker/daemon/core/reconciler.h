// Makes what the machine runs equal to what the coordinator wants, one step at a time.
#ifndef MUSTER_WORKER_DAEMON_CORE_RECONCILER_H_
#define MUSTER_WORKER_DAEMON_CORE_RECONCILER_H_

#include <string>

#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/attempts.h"
#include "worker/daemon/core/commit_queue.h"
#include "worker/daemon/core/config.h"
#include "worker/daemon/core/events.h"
#include "worker/daemon/core/outbox.h"
#include "worker/daemon/core/rank_calls.h"

namespace muster::worker {

// Level-triggered: SetDesired and the events change the attempts, and Converge does whatever is
// left to do, however often it is called. It never starts a rank twice, and it ends one only
// because a Desired says so. A rank that runs when its attempt's membership grows is told so, and
// starts anew by itself, as the same process. All that it refers to must outlive it.
class Reconciler {
 public:
  Reconciler(const DaemonCoreConfig& config, AttemptTable& attempts, CommitQueue& commits,
             RankCalls& calls, Outbox& outbox)
      : config_(config), attempts_(attempts), commits_(commits), calls_(calls), outbox_(outbox) {}

  // After a restart: looks for every rank that may run, and for what is left of those that ended.
  void Recover();

  // Takes what the coordinator wants; an attempt that it does not name is to end.
  void SetDesired(const v1::Desired& desired);

  void On(const AttemptPrepared& event);
  void On(const RankStarted& event);
  void On(const RankNotStarted& event);
  void On(const RankExited& event);
  void On(const RankReassigned& event);
  void On(const ReleaseProven& event);

  // One step from what is held towards what is wanted, for every attempt.
  void Converge();

  // When a rank that was asked to end is to be killed; InfiniteFuture when there is none.
  absl::Time NextDeadline() const;

 private:
  void Adopt(const AttemptKey& key, const v1::DesiredAttempt& desired);
  // Takes a larger membership. False: what is desired is of an earlier one.
  bool TakeMembership(const AttemptKey& key, AttemptState& attempt,
                      const v1::DesiredAttempt& desired);
  void Refuse(const AttemptKey& key, AttemptState& attempt, v1::Cause cause,
              const std::string& why);
  // Why this worker cannot run the attempt; empty when it can.
  std::string WhyRefuse(const v1::DesiredAttempt& desired) const;
  // Adds what only this worker knows.
  void CompleteAssignment(const AttemptKey& key, v1::RankAssignment& assignment) const;
  void ConvergeAttempt(const AttemptKey& key, AttemptState& attempt);
  void StopRank(const RankKey& key, const AttemptState& attempt, RankState& rank);
  void EnterExited(const RankKey& key, RankState& rank);
  void AddCommits(const RankKey& key, const std::vector<v1::CheckpointRecord>& checkpoints);

  const DaemonCoreConfig& config_;
  AttemptTable& attempts_;
  CommitQueue& commits_;
  RankCalls& calls_;
  Outbox& outbox_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_RECONCILER_H_
