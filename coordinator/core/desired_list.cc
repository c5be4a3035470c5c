#include "coordinator/core/desired_list.h"

#include <utility>

namespace muster::coordinator {

bool DesiredList::Update(const std::map<JobId, Attempt>& wanted) {
  const uint64_t next = revision_ + 1;
  // Nothing was sent in this session, so that even an empty set must be sent.
  bool changed = revision_ == 0 || wanted.size() != listed_.size();
  std::map<JobId, Listed> listed;
  for (const auto& [job, attempt] : wanted) {
    Listed entry{attempt, next, 0};
    const auto known = listed_.find(job);
    if (known != listed_.end() && known->second.attempt.epoch == attempt.epoch) {
      const Attempt& before = known->second.attempt;
      changed |= before.phase != attempt.phase || before.stop_grace != attempt.stop_grace ||
                 before.membership != attempt.membership ||
                 (attempt.described && !before.described);
      entry.since = known->second.since;
      entry.stopped_since = known->second.stopped_since;
    } else {
      changed = true;
    }
    if (attempt.phase == v1::DESIRED_PHASE_STOPPED && entry.stopped_since == 0) {
      entry.stopped_since = next;
    }
    listed.emplace(job, entry);
  }
  const bool lost = std::exchange(lost_, false);
  if (!changed) return lost;
  listed_ = std::move(listed);
  revision_ = next;
  return true;
}

bool DesiredList::Applied(uint64_t revision, absl::Duration patience, absl::Time now) {
  if (revision >= revision_ || now < sent_at_ + patience) return false;
  lost_ = true;
  return true;
}

bool DesiredList::Knew(const JobId& job, Epoch epoch, bool stopping, uint64_t applied) const {
  const auto found = listed_.find(job);
  if (found == listed_.end() || found->second.attempt.epoch != epoch) return false;
  const Listed& listed = found->second;
  if (!stopping) return applied >= listed.since;
  return listed.stopped_since > 0 && applied >= listed.stopped_since;
}

const DesiredList::Attempt* DesiredList::Find(const JobId& job, Epoch epoch) const {
  const auto found = listed_.find(job);
  const bool listed = found != listed_.end() && found->second.attempt.epoch == epoch;
  return listed ? &found->second.attempt : nullptr;
}

}  // namespace muster::coordinator
