// The calls of users that wait for an answer of the core or of a daemon.
#ifndef MUSTER_COORDINATOR_PENDING_CALLS_H_
#define MUSTER_COORDINATOR_PENDING_CALLS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/check.h"
#include "base/mutex.h"
#include "coordinator/core/core.h"

namespace muster::coordinator {

// The answer to a call about one job.
struct JobReply {
  v1::Job job;
  bool existed = false;                    // the request id had been accepted before
  std::vector<v1::Worker> workers = {};    // of a call about workers
  v1::ArrayReport array = {};              // of a call about an array
  std::vector<std::string> warnings = {};  // of a policy that was applied
};

// What is called, once, with the answer to a call.
template <typename Reply>
using Done = absl::AnyInvocable<void(absl::StatusOr<Reply>)>;

// A call that waits for a Reply.
template <typename Reply>
struct PendingCall {
  CallId id;
};

// Thread-safe. Each call is answered exactly once, by the first of Answer, FailAll and a refusal.
// Bound: kCallsWaitingMax for each type of Reply, so that questions to ranks never take the place
// of a submission.
class PendingCalls {
 public:
  // Keeps `done` until the call is answered. When no call can be taken, calls `done` with the
  // reason and returns nothing: the status given to Refuse, or kResourceExhausted.
  template <typename Reply>
  std::optional<PendingCall<Reply>> Add(Done<Reply> done) {
    const std::optional<CallId> id = Keep(std::move(done));
    if (!id.has_value()) return std::nullopt;
    return PendingCall<Reply>{*id};
  }

  // Does nothing when the call was answered before.
  template <typename Reply>
  void Answer(PendingCall<Reply> call, absl::StatusOr<Reply> reply) {
    std::optional<AnyDone> done = Take(call.id);
    if (!done.has_value()) return;
    auto* typed = std::get_if<Done<Reply>>(&*done);
    CHECK(typed != nullptr) << "call " << call.id.value() << " waits for another kind of answer";
    (*typed)(std::move(reply));
  }

  // From now on every new call fails with `status`.
  void Refuse(const absl::Status& status);
  // Every call that waits fails with `status`.
  void FailAll(const absl::Status& status);

 private:
  using AnyDone = std::variant<Done<JobReply>, Done<std::vector<v1::Worker>>, Done<v1::LogReply>,
                               Done<v1::CollectivesReply>, Done<v1::ProfileReply>, Done<Explained>,
                               Done<OpenUsage>, Done<v1::GetQueuesResponse>, Done<v1::QueuePolicy>>;

  std::optional<CallId> Keep(AnyDone done);
  std::optional<AnyDone> Take(CallId id);

  Mutex mutex_;
  absl::Status refusal_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_ ABSL_GUARDED_BY(mutex_) = 1;
  std::map<CallId, AnyDone> calls_ ABSL_GUARDED_BY(mutex_);
  // How many of calls_ there are of each alternative of AnyDone.
  std::array<size_t, std::variant_size_v<AnyDone>> waiting_ ABSL_GUARDED_BY(mutex_) = {};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_PENDING_CALLS_H_
