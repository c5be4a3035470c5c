#include "worker/daemon/output_queue.h"

#include <iterator>
#include <utility>
#include <variant>

#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

// Null: another action.
const SendToCoordinator* AsObserved(const DaemonAction& action) {
  const auto* send = std::get_if<SendToCoordinator>(&action);
  return send != nullptr && send->message.has_observed() ? send : nullptr;
}

}  // namespace

OutputQueue::OutputQueue(Loop& loop, Parts parts)
    : loop_(loop), parts_(std::move(parts)), thread_([this] { Run(); }) {}

OutputQueue::~OutputQueue() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void OutputQueue::Add(DaemonOutput output) {
  const bool changed = !output.records.empty();
  if (changed) Push(std::move(output.records));
  Waiting waiting{added_, {}};
  const bool wait = added_ > durable_;
  for (DaemonAction& action : output.actions) {
    if (!wait || std::holds_alternative<ArmTimer>(action)) {
      Carry(std::move(action));
      continue;
    }
    if (const SendToCoordinator* observed = AsObserved(action)) {
      if (!changed) RepeatObserved(observed->session);
      DropWaitingObserved();
    }
    waiting.actions.push_back(std::move(action));
  }
  if (!waiting.actions.empty()) waiting_.push_back(std::move(waiting));
}

void OutputQueue::Carry(DaemonAction action) {
  if (const SendToCoordinator* observed = AsObserved(action)) observed_ = *observed;
  parts_.carry(std::move(action));
}

void OutputQueue::RepeatObserved(SessionId session) {
  if (observed_.has_value() && observed_->session == session) parts_.carry(*observed_);
}

void OutputQueue::DropWaitingObserved() {
  bool kept = false;
  for (Waiting& waiting : waiting_) {
    std::vector<DaemonAction> actions;
    for (DaemonAction& action : waiting.actions) {
      if (AsObserved(action) != nullptr) {
        if (kept || waiting.after == added_) continue;
        kept = true;
      }
      actions.push_back(std::move(action));
    }
    waiting.actions = std::move(actions);
  }
}

void OutputQueue::Release(uint64_t durable) {
  durable_ = durable;
  std::vector<DaemonAction> due;
  size_t newest = 0;  // behind the newest Observed, which says all that those before say
  while (!waiting_.empty() && waiting_.front().after <= durable) {
    for (DaemonAction& action : waiting_.front().actions) {
      due.push_back(std::move(action));
      if (AsObserved(due.back()) != nullptr) newest = due.size();
    }
    waiting_.pop_front();
  }
  for (size_t i = 0; i < due.size(); ++i) {
    if (AsObserved(due[i]) == nullptr || i + 1 == newest) Carry(std::move(due[i]));
  }
}

// ---- the writer ---------------------------------------------------------------------------------

void OutputQueue::Push(std::vector<DaemonRecord> records) {
  ++added_;
  MutexLock lock(&mutex_);
  auto has_capacity = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return failed_ || queue_.size() < kOutputsWaitingMax;
  };
  mutex_.Await(Condition(&has_capacity));
  if (!failed_) queue_.push_back(std::move(records));
}

void OutputQueue::AwaitWritten() {
  MutexLock lock(&mutex_);
  auto written = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return failed_ || (queue_.empty() && !writing_);
  };
  mutex_.Await(Condition(&written));
}

void OutputQueue::Run() {
  uint64_t taken = 0;
  while (true) {
    std::vector<DaemonRecord> group;
    {
      MutexLock lock(&mutex_);
      writing_ = false;
      auto has_work = [this]()
                          ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stop_ || !queue_.empty(); };
      mutex_.Await(Condition(&has_work));
      if (queue_.empty()) return;
      writing_ = true;
      for (std::vector<DaemonRecord>& records : queue_) {
        std::move(records.begin(), records.end(), std::back_inserter(group));
      }
      taken += queue_.size();
      queue_.clear();
    }
    if (const absl::Status status = parts_.write(group); !status.ok()) {
      {
        MutexLock lock(&mutex_);
        failed_ = true;
        queue_.clear();
      }
      loop_.Post([this, status] { parts_.failed(status); });
      return;
    }
    loop_.Post([this, taken] { Release(taken); });
  }
}

}  // namespace muster::worker
