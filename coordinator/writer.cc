#include "coordinator/writer.h"

#include <utility>

#include "base/status_macros.h"
#include "coordinator/limits.h"

namespace muster::coordinator {
namespace {

size_t BytesOf(const Batch& batch) {
  size_t bytes = 0;
  for (const Batch::Change& change : batch.changes) {
    bytes += change.key.size() + (change.value.has_value() ? change.value->size() : 0);
  }
  return bytes;
}

}  // namespace

Writer::Writer(const Parts& parts, absl::AnyInvocable<void(PendingOutput&)> release,
               absl::AnyInvocable<void(const absl::Status&)> on_failure)
    : parts_(parts),
      release_(std::move(release)),
      on_failure_(std::move(on_failure)),
      thread_([this] { Run(); }) {}

Writer::~Writer() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
  }
  thread_.join();
}

void Writer::Push(PendingOutput output) {
  MutexLock lock(&mutex_);
  auto has_capacity = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return failed_ || (batches_ < kBatchesWaitingMax && queue_.size() < kOutputsWaitingMax);
  };
  mutex_.Await(Condition(&has_capacity));
  if (failed_) return;
  batches_ += output.output.batch.empty() ? 0 : 1;
  queue_.push_back(std::move(output));
}

void Writer::AwaitIdle() {
  MutexLock lock(&mutex_);
  auto idle = [this]() ABSL_SHARED_LOCKS_REQUIRED(mutex_) {
    return failed_ || (queue_.empty() && !busy_);
  };
  mutex_.Await(Condition(&idle));
}

void Writer::Run() {
  while (true) {
    std::vector<PendingOutput> group;
    {
      MutexLock lock(&mutex_);
      busy_ = false;
      auto has_work = [this]()
                          ABSL_SHARED_LOCKS_REQUIRED(mutex_) { return stop_ || !queue_.empty(); };
      mutex_.Await(Condition(&has_work));
      if (queue_.empty()) return;
      busy_ = true;
      for (size_t bytes = 0; !queue_.empty() && bytes < kWriteBytesMax;) {
        bytes += BytesOf(queue_.front().output.batch);
        batches_ -= queue_.front().output.batch.empty() ? 0 : 1;
        group.push_back(std::move(queue_.front()));
        queue_.pop_front();
      }
    }
    if (const absl::Status written = WriteGroup(group); !written.ok()) return Fail(written);
    for (PendingOutput& output : group) release_(output);
  }
}

absl::Status Writer::WriteGroup(std::vector<PendingOutput>& group) {
  std::vector<Batch> batches;
  size_t bytes = 0;
  for (PendingOutput& pending : group) {
    if (pending.output.batch.empty()) continue;
    bytes += BytesOf(pending.output.batch);
    batches.push_back(std::move(pending.output.batch));
  }
  if (batches.empty()) return absl::OkStatus();
  const absl::Duration start = parts_.clock.Monotonic();
  RETURN_IF_ERROR(parts_.store.Write(batches));
  parts_.metrics.Wrote(batches.size(), bytes, parts_.clock.Monotonic() - start);
  return absl::OkStatus();
}

void Writer::Fail(const absl::Status& status) {
  {
    MutexLock lock(&mutex_);
    failed_ = true;
    queue_.clear();
    batches_ = 0;
  }
  on_failure_(status);
}

}  // namespace muster::coordinator
