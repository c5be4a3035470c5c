// Carries the core's outputs out: records first, on a thread of their own, then the actions.
#ifndef MUSTER_WORKER_DAEMON_OUTPUT_QUEUE_H_
#define MUSTER_WORKER_DAEMON_OUTPUT_QUEUE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/loop.h"
#include "base/mutex.h"
#include "worker/daemon/core/events.h"

namespace muster::worker {

// Persists before it acts: an action is carried out when the records of its output and of every
// output before it are durable. All records that wait are written as one group.
//
// The loop does not wait for the disk. In place of a heartbeat, an Observed without changes, that
// waits behind records, the newest one that has been sent in its session is sent again: the
// coordinator hears the daemon, and learns nothing that is not durable.
class OutputQueue {
 public:
  struct Parts {
    // On the queue's thread. After OK all records are durable.
    std::function<absl::Status(const std::vector<DaemonRecord>&)> write;
    // On the loop, in the order of the actions, but for ArmTimer, which nobody else can see and
    // which is carried out at once.
    std::function<void(DaemonAction)> carry;
    // On the loop, once: a write has failed. Nothing is written or carried out from then on.
    std::function<void(const absl::Status&)> failed;
  };

  OutputQueue(Loop& loop, Parts parts);
  // Writes the records that wait. Requires: the loop runs no more work.
  ~OutputQueue();

  // On the loop. Blocks while kOutputsWaitingMax outputs with records wait for the disk.
  void Add(DaemonOutput output) ABSL_LOCKS_EXCLUDED(mutex_);
  // From any thread but the loop's: blocks until what was added before is durable, and its actions
  // are carried out by what the loop has been posted; or until a write has failed.
  void AwaitWritten() ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  // Actions that wait until the outputs up to `after` are durable.
  struct Waiting {
    uint64_t after = 0;
    std::vector<DaemonAction> actions;
  };

  void Run() ABSL_LOCKS_EXCLUDED(mutex_);
  void Push(std::vector<DaemonRecord> records) ABSL_LOCKS_EXCLUDED(mutex_);
  void Release(uint64_t durable);
  void Carry(DaemonAction action);
  void RepeatObserved(SessionId session);
  // Of the Observed that wait, before another one does: drops those that wait for no less than it
  // will, and of the others all but the first. So the coordinator hears of what becomes durable
  // also while there is always something that is not yet.
  void DropWaitingObserved();

  Loop& loop_;
  const Parts parts_;
  // On the loop only.
  std::deque<Waiting> waiting_;
  std::optional<SendToCoordinator> observed_;  // the newest that was carried out
  uint64_t added_ = 0;                         // outputs with records
  uint64_t durable_ = 0;                       // of those, how many are durable

  Mutex mutex_;
  std::deque<std::vector<DaemonRecord>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_OUTPUT_QUEUE_H_
