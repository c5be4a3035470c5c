#include "worker/daemon/core/commit_queue.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "worker/daemon/core/limits.h"

namespace muster::worker {
namespace {

std::string RecordName(const AttemptKey& key, int64_t step) {
  return absl::StrCat(CommitQueue::kRecordPrefix, DirectoryName(key), ".", step);
}

}  // namespace

bool CommitQueue::Load(const std::string& record) {
  Pending pending;
  if (!pending.commit.ParseFromString(record)) return false;
  const AttemptKey key = KeyOf(pending.commit);
  const int64_t step = pending.commit.checkpoint().step();
  commits_.emplace(std::make_pair(key, step), std::move(pending));
  return true;
}

bool CommitQueue::full() const { return commits_.size() >= kCommitsMax; }

bool CommitQueue::Has(const AttemptKey& key) const {
  const auto first = commits_.lower_bound({key, INT64_MIN});
  return first != commits_.end() && first->first.first == key;
}

void CommitQueue::Add(const AttemptKey& key, const v1::CheckpointRecord& checkpoint) {
  Pending& pending = commits_[{key, checkpoint.step()}];
  pending.commit.set_job_id(key.job.value());
  pending.commit.set_epoch(key.epoch.value());
  *pending.commit.mutable_checkpoint() = checkpoint;
  pending.commit.mutable_checkpoint()->set_epoch(key.epoch.value());
  outbox_.Write(RecordName(key, checkpoint.step()), pending.commit.SerializeAsString());
}

void CommitQueue::AddMissing(const AttemptKey& key,
                             const std::vector<v1::CheckpointRecord>& checkpoints,
                             int64_t last_committed_step) {
  for (const v1::CheckpointRecord& checkpoint : checkpoints) {
    if (checkpoint.step() <= last_committed_step) continue;
    if (commits_.count({key, checkpoint.step()}) > 0) continue;
    if (!full()) Add(key, checkpoint);
  }
}

bool CommitQueue::Resolve(const AttemptKey& key, int64_t step) {
  if (commits_.erase({key, step}) == 0) return false;
  outbox_.Write(RecordName(key, step), std::nullopt);
  return true;
}

void CommitQueue::SendDue() {
  const absl::Time now = outbox_.now();
  for (auto& [key, pending] : commits_) {
    if (pending.sent_at.has_value() && now - *pending.sent_at < resend_interval_) continue;
    pending.sent_at = now;
    v1::FromWorker message;
    *message.mutable_commit() = pending.commit;
    outbox_.Send(std::move(message));
  }
}

void CommitQueue::BeginSession() {
  for (auto& [key, pending] : commits_) pending.sent_at.reset();
}

absl::Time CommitQueue::NextDeadline() const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [key, pending] : commits_) {
    if (pending.sent_at.has_value()) next = std::min(next, *pending.sent_at + resend_interval_);
  }
  return next;
}

}  // namespace muster::worker
