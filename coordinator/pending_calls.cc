#include "coordinator/pending_calls.h"

#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

std::optional<CallId> PendingCalls::Keep(AnyDone done) {
  absl::Status refusal;
  {
    MutexLock lock(&mutex_);
    refusal = refusal_;
    if (refusal.ok() && waiting_[done.index()] >= kCallsWaitingMax) {
      refusal = absl::ResourceExhaustedError(
          absl::StrCat("more than ", kCallsWaitingMax, " calls wait for the coordinator; retry"));
    }
    if (refusal.ok()) {
      const CallId call(next_++);
      ++waiting_[done.index()];
      calls_.emplace(call, std::move(done));
      return call;
    }
  }
  std::visit([&](auto& typed) { typed(refusal); }, done);
  return std::nullopt;
}

std::optional<PendingCalls::AnyDone> PendingCalls::Take(CallId id) {
  MutexLock lock(&mutex_);
  const auto found = calls_.find(id);
  if (found == calls_.end()) return std::nullopt;
  std::optional<AnyDone> done = std::move(found->second);
  calls_.erase(found);
  --waiting_[done->index()];
  return done;
}

void PendingCalls::Refuse(const absl::Status& status) {
  MutexLock lock(&mutex_);
  refusal_ = status;
}

void PendingCalls::FailAll(const absl::Status& status) {
  std::map<CallId, AnyDone> calls;
  {
    MutexLock lock(&mutex_);
    calls.swap(calls_);
    waiting_ = {};
  }
  for (auto& [id, done] : calls) {
    std::visit([&](auto& typed) { typed(status); }, done);
  }
}

}  // namespace muster::coordinator
