// The rank's calls to its daemon, over the daemon's unix socket.
//
// The daemon may be away (restarted, upgraded) at any moment: nothing here blocks training on it.
// Calls are repeated until they are acknowledged, unless the daemon answers that it does not hold
// this attempt any more (ABORTED): then `on_aborted` runs once and the rank must end.
#ifndef MUSTER_WORKER_RANK_DAEMON_CLIENT_H_
#define MUSTER_WORKER_RANK_DAEMON_CLIENT_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/rank.pb.h"
#include "parallel/comm/communicator.h"

namespace muster::worker {

struct DaemonClientOptions {
  std::string job_id;
  uint64_t epoch = 0;
  int32_t rank = 0;
  uint32_t membership = 1;
  std::string socket;  // RankAssignment.daemon_socket
  // RankAssignment.run_directory; empty = commits are not kept on disk (tests).
  std::string run_directory;
  absl::Duration report_interval = absl::Milliseconds(200);
  absl::Duration retry_interval = absl::Milliseconds(100);  // while the daemon is away
  // A report or commit that the daemon has not answered within this time is repeated: the daemon
  // may have died with the call, or be stopped.
  absl::Duration attempt_timeout = absl::Seconds(2);
  // Called at most once, on a thread of the client, when the attempt has ended; the message says
  // why.
  absl::AnyInvocable<void(absl::Status)> on_aborted;
  // Called when the run directory has an assignment of this larger membership, on the thread that
  // reports progress, which waits for it.
  absl::AnyInvocable<void(uint32_t)> on_membership;
  // Called once for each number when somebody asks what this rank's collectives are doing, on the
  // thread that reports progress, which waits for it.
  absl::AnyInvocable<void(uint64_t)> on_collectives;
  // When no new progress was given for this long, the last one is reported with `answers` and what
  // `on_stuck` adds to it, once a second. On the thread that reports.
  absl::Duration stuck_after = absl::Seconds(10);
  absl::AnyInvocable<void(v1::RankProgress&)> on_stuck;

  static DaemonClientOptions From(const v1::RankAssignment& assignment);
};

// Thread-safe. Owns its threads: one reports, one delivers commits and one notices, each in order.
class DaemonClient : public parallel::KeyValueStore {
 public:
  // Connects lazily: OK also while no daemon listens. kInvalidArgument: no socket in the options.
  static absl::StatusOr<std::unique_ptr<DaemonClient>> Make(DaemonClientOptions options);
  // Stops without waiting for what is not delivered; call Flush first.
  ~DaemonClient() override = default;

  // Sets the progress to report; the newest is sent every report_interval. Never blocks.
  virtual void Report(const v1::RankProgress& progress) = 0;
  // Sends the newest progress now, for a phase that the coordinator should see soon. Never blocks.
  virtual void ReportNow(const v1::RankProgress& progress) = 0;
  // The daemon wants this rank to end at the next step boundary.
  virtual bool stop_requested() const = 0;
  // Newest step of this attempt whose checkpoint the coordinator has committed; 0 = none.
  virtual int64_t last_committed_step() const = 0;
  // The daemon has answered that this attempt is over.
  virtual bool aborted() const = 0;

  // Leaves the request in the run directory, synced, where a daemon that is away now finds it even
  // if this process dies; then queues it, to be repeated until the daemon has stored it. Blocks for
  // one small synced write, so that no later step can finish before the request is safe.
  virtual void Commit(const v1::CheckpointRecord& checkpoint) = 0;
  virtual void Notify(const v1::DamagedCheckpoint& damaged) = 0;
  virtual void Notify(const v1::RemovedCheckpoint& removed) = 0;
  virtual void Notify(const v1::Evaluation& evaluation) = 0;
  // Waits until the daemon has everything queued so far and the newest progress.
  // kDeadlineExceeded, or kAborted when the attempt has ended.
  virtual absl::Status Flush(absl::Duration timeout) = 0;
  // Waits until `step` is committed: kDeadlineExceeded when no verdict came in time, kAborted when
  // the attempt has ended.
  virtual absl::Status WaitCommitted(int64_t step, absl::Duration timeout) = 0;

  // KeyValueStore: Put waits for the coordinator's acknowledgement, at most `put_timeout` (1
  // minute); Get waits for the key. Both wait through an absent daemon. kDeadlineExceeded; kAborted
  // when the attempt has ended.
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_DAEMON_CLIENT_H_
