// The calls of users that wait for an answer of the core or of a daemon.
#ifndef MUSTER_COORDINATOR_PENDING_CALLS_H_
#define MUSTER_COORDINATOR_PENDING_CALLS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"

namespace muster::coordinator {

// The answer to a call. Calls that are not about one job leave it empty and fill in a result of
// their own (AddWithResult).
struct JobReply {
  v1::Job job;
  bool existed = false;  // the request id had been accepted before
};

// Thread-safe. Each call is answered exactly once, by the first of Answer, FailAll and a refusal.
// Bound: kCallsWaitingMax.
class PendingCalls {
 public:
  using Done = absl::AnyInvocable<void(absl::StatusOr<JobReply>)>;

  // Keeps `done` until the call is answered. When no call can be taken, calls `done` with the
  // reason and returns nothing: the status given to Refuse, or kResourceExhausted.
  std::optional<CallId> Add(Done done);

  // As Add for a call with another result, which must be in `*result` before Answer(call,
  // JobReply{}).
  template <typename Result>
  std::optional<CallId> AddWithResult(std::shared_ptr<Result> result,
                                      absl::AnyInvocable<void(absl::StatusOr<Result>)> done) {
    return Add([result = std::move(result),
                done = std::move(done)](absl::StatusOr<JobReply> reply) mutable {
      if (!reply.ok()) {
        done(reply.status());
      } else {
        done(std::move(*result));
      }
    });
  }

  // Does nothing when the call was answered before.
  void Answer(CallId call, absl::StatusOr<JobReply> reply);

  // From now on every new call fails with `status`.
  void Refuse(const absl::Status& status);
  // Every call that waits fails with `status`.
  void FailAll(const absl::Status& status);

 private:
  Mutex mutex_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<CallId, Done> calls_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_PENDING_CALLS_H_
