// Checkpoint commits that the coordinator has not answered yet.
#ifndef MUSTER_WORKER_DAEMON_CORE_COMMIT_QUEUE_H_
#define MUSTER_WORKER_DAEMON_CORE_COMMIT_QUEUE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/keys.h"
#include "worker/daemon/core/outbox.h"

namespace muster::worker {

// Keeps each commit, as a durable record, until the coordinator's verdict, and sends it again and
// again until then: over sessions, and over restarts of the daemon. At most kCommitsMax.
class CommitQueue {
 public:
  static constexpr char kRecordPrefix[] = "commit.";

  CommitQueue(absl::Duration resend_interval, Outbox& outbox)
      : resend_interval_(resend_interval), outbox_(outbox) {}

  // Takes a record of an earlier daemon. False: it cannot be read.
  bool Load(const std::string& record);

  bool full() const;
  int size() const { return static_cast<int>(commits_.size()); }
  // Whether some commit of the attempt waits. Its ranks' exits are held back meanwhile: they would
  // end the attempt, and with it the chance of its last checkpoint.
  bool Has(const AttemptKey& key) const;

  // Requires: not full, unless a commit of this step waits already.
  void Add(const AttemptKey& key, const v1::CheckpointRecord& checkpoint);
  // Adds those after `last_committed_step` that do not wait already, as far as there is space.
  void AddMissing(const AttemptKey& key, const std::vector<v1::CheckpointRecord>& checkpoints,
                  int64_t last_committed_step);
  // The coordinator has answered. False: it is not waited for (any more).
  bool Resolve(const AttemptKey& key, int64_t step);

  // Sends what has not been sent for the resend interval. Requires: the session is welcomed.
  void SendDue();
  // Nothing has been sent on the session that begins.
  void BeginSession();
  // When SendDue next has something to send; InfiniteFuture when nothing waits.
  absl::Time NextDeadline() const;

 private:
  struct Pending {
    v1::CheckpointCommit commit;
    std::optional<absl::Time> sent_at;  // in this session
  };

  const absl::Duration resend_interval_;
  Outbox& outbox_;
  std::map<std::pair<AttemptKey, int64_t>, Pending> commits_;  // by attempt and step
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_COMMIT_QUEUE_H_
