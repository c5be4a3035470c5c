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

// Of what a rank has left in files: its log, its trace, its record of collectives.
size_t FileBytes(const v1::FromWorker& message) {
  if (message.has_log()) return message.log().data().size();
  if (message.has_profile()) return message.profile().data().size();
  return message.has_collectives() ? message.collectives().record().ByteSizeLong() : 0;
}

template <typename Reply>
void Refuse(Reply& reply) {
  reply.set_status_code(static_cast<int32_t>(absl::StatusCode::kResourceExhausted));
  reply.set_status_message("too many replies wait for the coordinator; ask again later");
}

// Takes the data out of the message and says why.
void RefuseFile(v1::FromWorker& message) {
  if (message.has_log()) {
    message.mutable_log()->clear_data();
    Refuse(*message.mutable_log());
  } else if (message.has_profile()) {
    message.mutable_profile()->clear_data();
    Refuse(*message.mutable_profile());
  } else {
    message.mutable_collectives()->clear_record();
    Refuse(*message.mutable_collectives());
  }
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
    case v1::FromWorker::kCollectives:
    case v1::FromWorker::kProfile:
    case v1::FromWorker::kNotice:
    case v1::FromWorker::KIND_NOT_SET:
      return false;
  }
  return false;
}

bool OutgoingQueue::Push(v1::FromWorker message) {
  if (FileBytes(message) > 0 && file_bytes_ + FileBytes(message) > kFileBytesUnsentMax) {
    RefuseFile(message);
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
  file_bytes_ += FileBytes(entry.message);
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
  file_bytes_ -= FileBytes(messages_.front().message);
  messages_.pop_front();
}

}  // namespace muster::worker
