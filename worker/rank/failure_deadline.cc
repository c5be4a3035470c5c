#include "worker/rank/failure_deadline.h"

#include <utility>

namespace muster::worker {

FailureDeadline::FailureDeadline(absl::Duration grace,
                                 absl::AnyInvocable<void(const absl::Status&)> expire)
    : grace_(grace), expire_(std::move(expire)), thread_([this] { Run(); }) {}

FailureDeadline::~FailureDeadline() { Disarm(); }

void FailureDeadline::Arm(const absl::Status& why) {
  MutexLock lock(&mutex_);
  if (why_.ok()) why_ = why;
}

void FailureDeadline::Disarm() {
  {
    MutexLock lock(&mutex_);
    disarmed_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void FailureDeadline::Run() {
  absl::Status why;
  {
    MutexLock lock(&mutex_);
    auto decided = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return disarmed_ || !why_.ok(); };
    mutex_.Await(Condition(&decided));
    if (mutex_.AwaitWithTimeout(Condition(&disarmed_), grace_)) return;
    why = why_;
  }
  expire_(why);
}

}  // namespace muster::worker
