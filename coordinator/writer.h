// Makes outputs of the core durable: one synced write for all that wait (group commit).
#ifndef MUSTER_COORDINATOR_WRITER_H_
#define MUSTER_COORDINATOR_WRITER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"
#include "coordinator/metrics.h"
#include "coordinator/store/store.h"

namespace muster::coordinator {

// One output of the core on its way to the disk, with what its actions need to know of the core as
// it was then: the core has moved on when they are carried out.
struct PendingOutput {
  CoreOutput output;
  uint64_t last_event = 0;
  absl::AnyInvocable<void()> then;  // called after the actions; may be empty
};

// Lifecycle: Push from one thread, AwaitIdle from any, destruction once nothing is pushed any more.
// Owns the writer thread. Bounds: kBatchesWaitingMax, and kOutputsWaitingMax with those that have
// only to be released in their turn.
class Writer {
 public:
  struct Parts {  // all outlive the writer
    Store& store;
    const Clock& clock;
    Metrics& metrics;
  };

  // On the writer thread: `release` is called for every output, in order, after its batch is
  // synced; `on_failure` is called once with the store's status when a write fails, and nothing is
  // written or released from then on.
  Writer(const Parts& parts, absl::AnyInvocable<void(PendingOutput&)> release,
         absl::AnyInvocable<void(const absl::Status&)> on_failure);
  // Writes and releases what was pushed, then joins the thread.
  ~Writer();

  // Blocks while too many outputs wait. After a failure the output is dropped.
  void Push(PendingOutput output);
  // Blocks until everything pushed before is released, or the writer has failed.
  void AwaitIdle();

 private:
  void Run();
  // Takes the batches out of the outputs.
  absl::Status WriteGroup(std::vector<PendingOutput>& group);
  void Fail(const absl::Status& status);

  const Parts parts_;
  absl::AnyInvocable<void(PendingOutput&)> release_;
  absl::AnyInvocable<void(const absl::Status&)> on_failure_;

  Mutex mutex_;
  std::deque<PendingOutput> queue_ ABSL_GUARDED_BY(mutex_);
  size_t batches_ ABSL_GUARDED_BY(mutex_) = 0;  // outputs in the queue that have one
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool busy_ ABSL_GUARDED_BY(mutex_) =
      false;            // outputs were taken from the queue, not yet released
  std::thread thread_;  // last: starts when everything above exists
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_WRITER_H_
