#include "worker/daemon/outgoing_queue.h"

#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "base/check.h"
#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

// Of memory beside its bytes on the wire, so that small messages are bounded too.
constexpr size_t kMessageOverhead = 256;

size_t LogBytes(const v1::FromWorker& message) {
  return message.has_log() ? message.log().data().size() : 0;
}

}  // namespace

bool OutgoingQueue::SubjectOf(const v1::FromWorker& message, Subject& subject) {
  subject.kind = message.kind_case();
  switch (message.kind_case()) {
    case v1::FromWorker::kObserved:
      return true;
    case v1::FromWorker::kPut:
      subject.number = message.put().request();
      return true;
    case v1::FromWorker::kGet:
      subject.number = message.get().request();
      return true;
    case v1::FromWorker::kCommit:
      subject.job = message.commit().job_id();
      subject.epoch = message.commit().epoch();
      subject.number = static_cast<uint64_t>(message.commit().checkpoint().step());
      return true;
    case v1::FromWorker::kHello:
    case v1::FromWorker::kLog:
    case v1::FromWorker::kNotice:
    case v1::FromWorker::KIND_NOT_SET:
      return false;
  }
  return false;
}

bool OutgoingQueue::Push(v1::FromWorker message) {
  if (LogBytes(message) > 0 && log_bytes_ + LogBytes(message) > kLogBytesUnsentMax) {
    v1::LogReply& reply = *message.mutable_log();
    reply.clear_data();
    reply.set_status_code(static_cast<int32_t>(absl::StatusCode::kResourceExhausted));
    reply.set_status_message("too many log replies wait for the coordinator; ask again later");
  }
  Entry entry;
  entry.bytes = message.ByteSizeLong() + kMessageOverhead;
  entry.message = std::move(message);
  Subject subject;
  const bool repeatable = SubjectOf(entry.message, subject);
  const auto before = repeatable ? unsent_.find(subject) : unsent_.end();
  const size_t freed = before == unsent_.end() ? 0 : before->second->bytes;
  if (bytes_ - freed + entry.bytes > kOutgoingBytesMax) return false;
  bytes_ = bytes_ - freed + entry.bytes;
  log_bytes_ += LogBytes(entry.message);
  if (before != unsent_.end() && !entry.message.has_observed()) {
    *before->second = std::move(entry);
    return true;
  }
  if (before != unsent_.end()) messages_.erase(before->second);
  messages_.push_back(std::move(entry));
  if (repeatable) unsent_[subject] = std::prev(messages_.end());
  return true;
}

const v1::FromWorker& OutgoingQueue::Send() {
  CHECK(!messages_.empty());
  Subject subject;
  if (SubjectOf(messages_.front().message, subject)) {
    const auto found = unsent_.find(subject);
    if (found != unsent_.end() && found->second == messages_.begin()) unsent_.erase(found);
  }
  return messages_.front().message;
}

void OutgoingQueue::Pop() {
  bytes_ -= messages_.front().bytes;
  log_bytes_ -= LogBytes(messages_.front().message);
  messages_.pop_front();
}

}  // namespace muster::worker
