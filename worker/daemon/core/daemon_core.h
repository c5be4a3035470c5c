// The worker daemon's core: a deterministic state machine on one thread. An event and a time go in,
// an output comes out: records that must be durable first, then actions that others can see. It
// does no I/O, reads no clock and takes no lock. The shell (worker/daemon/daemon.h) carries the
// output out; the simulator drives the same class with simulated time, network, disk and processes.
//
// It makes what the machine runs equal to what the coordinator wants (Desired), level-triggered:
// any message may be lost, repeated or come late. It never restarts a rank, and never ends one
// because the coordinator is out of reach: only a Desired of the current session can do that.
//
//   DaemonCore      sessions and leaders, dispatch, what the coordinator is told and when
//   Reconciler      decides what to start, signal and reap
//   AttemptTable    attempts and ranks, with their records
//   CommitQueue     checkpoint commits without a verdict
//   RankCalls       calls of ranks that wait for the coordinator
//   Outbox          the output of the event at hand, and the session
#ifndef MUSTER_WORKER_DAEMON_CORE_DAEMON_CORE_H_
#define MUSTER_WORKER_DAEMON_CORE_DAEMON_CORE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/v1/daemon_state.pb.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/attempts.h"
#include "worker/daemon/core/commit_queue.h"
#include "worker/daemon/core/config.h"
#include "worker/daemon/core/events.h"
#include "worker/daemon/core/keys.h"
#include "worker/daemon/core/outbox.h"
#include "worker/daemon/core/rank_calls.h"
#include "worker/daemon/core/reconciler.h"

namespace muster::worker {

// For metrics and messages.
struct DaemonSummary {
  bool session_welcomed = false;
  int attempts = 0;
  int slots = 0;  // offered devices that ranks can be started on
  int slots_used = 0;
  int commits_pending = 0;
  int key_value_pending = 0;
  std::map<v1::RankState, int> ranks;  // by state
};

// Thread: one. Bounds: limits.h.
class DaemonCore {
 public:
  // Rebuilds the state from the durable records. The output, which attaches to every rank that may
  // run, must be carried out before any event is handled. kDataLoss names the record that cannot be
  // read.
  static absl::StatusOr<std::unique_ptr<DaemonCore>> Recover(
      DaemonCoreConfig config, const std::map<std::string, std::string>& records, absl::Time now,
      DaemonOutput* output);

  DaemonOutput Handle(const DaemonEvent& event, absl::Time now);

  // ---- reads
  DaemonSummary Summary() const;
  // What the next Observed would say.
  v1::Observed Observe() const;
  Incarnation incarnation() const { return Incarnation(identity_.incarnation()); }
  const std::string& cluster_id() const { return cluster_.cluster_id(); }
  uint64_t leader_term() const { return cluster_.leader_term(); }
  const std::string& history_id() const { return cluster_.history_id(); }
  bool Holds(const AttemptKey& key) const { return attempts_.all().count(key) > 0; }
  // DirectoryName of every attempt that is held.
  std::set<std::string> HeldDirectories() const;
  // No value before the rank has ended, or when it is not held.
  std::optional<v1::RankExit> ExitOf(const RankKey& key) const;
  // "cuda:0"; empty when the rank is not held.
  std::string DeviceOf(const RankKey& key) const;
  // The rank learns with its next report that this record of its collectives is wanted.
  // kFailedPrecondition: it does not run here.
  absl::Status AskForCollectives(const RankKey& key, uint64_t number);
  // Broken invariants, for tests and the simulator; empty when sound.
  std::vector<std::string> CheckInvariants() const;

 private:
  explicit DaemonCore(DaemonCoreConfig config);
  absl::Status Load(const std::map<std::string, std::string>& records);
  // Takes the next incarnation, and an identity when there is none.
  void Identify();

  void On(const SessionUp& event);
  void On(const SessionDown& event);
  void On(const CoordinatorMessage& event);
  void On(const RankCall& event);
  void On(const RankCallCancelled& event);
  void On(const DeviceFailed& event);
  void On(const TimerFired& event);
  void On(const AttemptPrepared& event) { reconciler_.On(event); }
  void On(const RankStarted& event) { reconciler_.On(event); }
  void On(const RankNotStarted& event) { reconciler_.On(event); }
  void On(const RankExited& event) { reconciler_.On(event); }
  void On(const RankReassigned& event) { reconciler_.On(event); }
  void On(const ReleaseProven& event) { reconciler_.On(event); }

  // Whether the message is of the current session, of this worker's cluster and of the newest
  // leader. Another cluster, an older leader or one of the same term in another history ends the
  // session.
  bool AcceptLeader(const CoordinatorMessage& event);
  void OnWelcome(const v1::Welcome& welcome);
  void OnDesired(const v1::Desired& desired);
  void OnVerdict(const v1::CheckpointVerdict& verdict);

  // Whether the daemon holds the caller's attempt; otherwise ends the call with kAborted.
  bool Authorize(CallId call, const v1::RankIdentity& identity);
  void Serve(CallId call, const v1::ReportRequest& request);
  void Serve(CallId call, const v1::PutRequest& request);
  void Serve(CallId call, const v1::GetRequest& request);
  void Serve(CallId call, const v1::CommitRequest& request);
  void Serve(CallId call, const v1::NotifyRequest& request);
  // Ends the call with kAborted, and returns true, when the attempt is being stopped.
  bool RefuseWhileStopping(CallId call, const v1::RankIdentity& identity);
  // Ends the call with kUnavailable, and returns true, when the rank is of an earlier membership:
  // it learns of the newer one with its next report.
  bool RefuseEarlierMembership(CallId call, const v1::RankIdentity& identity);

  // `listening` with an address that others can dial in the place of a wildcard.
  std::string Reachable(const std::string& listening) const;
  void SendObserved();
  // How long after the last Observed the next one is due, when nothing but progress changes.
  absl::Duration ObservedInterval() const;
  absl::Time NextDeadline() const;
  // Ends the handling of an event: writes records, reports to the coordinator, arms the timer.
  void Finish();

  DaemonCoreConfig config_;
  v1::StoredCluster cluster_;
  v1::StoredIdentity identity_;
  AttemptTable attempts_;
  Outbox outbox_;
  CommitQueue commits_;
  RankCalls calls_;
  Reconciler reconciler_;

  absl::Time welcome_deadline_ = absl::InfiniteFuture();
  std::optional<uint64_t> applied_revision_;  // of this session
  absl::Duration heartbeat_interval_;
  absl::Time observed_at_ = absl::InfinitePast();  // when Observed was last sent
  absl::Time armed_ = absl::InfiniteFuture();      // time of the newest ArmTimer
  bool state_changed_ = false;                     // send Observed at once
  bool progress_changed_ = false;                  // send it within progress_interval
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_DAEMON_CORE_H_
