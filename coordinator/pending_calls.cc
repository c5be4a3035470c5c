#include "coordinator/pending_calls.h"

#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

std::optional<CallId> PendingCalls::Add(Done done) {
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    refusal = refusal_;
    if (refusal.ok() && calls_.size() >= kCallsWaitingMax) {
      refusal = absl::ResourceExhaustedError(
          absl::StrCat("more than ", kCallsWaitingMax, " calls wait for the coordinator; retry"));
    }
    if (refusal.ok()) {
      const CallId call(next_++);
      calls_.emplace(call, std::move(done));
      return call;
    }
  }
  done(refusal);
  return std::nullopt;
}

void PendingCalls::Answer(CallId call, absl::StatusOr<JobReply> reply) {
  Done done;
  {
    MutexLock lock(&mutex_);
    const auto found = calls_.find(call);
    if (found == calls_.end()) return;
    done = std::move(found->second);
    calls_.erase(found);
  }
  done(std::move(reply));
}

void PendingCalls::Refuse(const absl::Status& status) {
  MutexLock lock(&mutex_);
  refusal_ = status;
}

void PendingCalls::FailAll(const absl::Status& status) {
  std::map<CallId, Done> calls;
  {
    MutexLock lock(&mutex_);
    calls.swap(calls_);
  }
  for (auto& [id, done] : calls) done(status);
}

}  // namespace muster::coordinator
