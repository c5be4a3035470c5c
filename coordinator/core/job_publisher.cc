#include "coordinator/core/job_publisher.h"

#include <utility>

#include "coordinator/core/limits.h"

namespace muster::coordinator {

void JobPublisher::Persist(Turn& turn) {
  std::set<JobId> changed = turn.changed();
  bool accounts = false;
  for (const JobId& id : turn.persist()) {
    JobEntry* job = jobs_.Find(id);
    if (job == nullptr) continue;  // an old ended job, forgotten in this turn
    accounts |= job->account_changed;
    job->PutState(turn.batch());
    job->PutProgress(turn.batch(), turn.now());
    changed.insert(id);
  }
  for (const JobId& id : turn.progressed()) {
    JobEntry* job = jobs_.Find(id);
    if (job == nullptr) continue;
    if (turn.now() - job->progress_stored_at >= kProgressPersistInterval) {
      job->PutProgress(turn.batch(), turn.now());
      if (job->account_changed) {
        accounts = true;
        job->PutState(turn.batch());
      }
    }
    changed.insert(id);
  }
  accounts_.PutFleet(accounts, turn.batch());
  for (const JobId& id : changed) {
    if (JobEntry* job = jobs_.Find(id); job != nullptr) Publish(*job, turn);
  }
}

// Every report of a large gang changes a rank, and each publication of its ranks copies all of
// them.
void JobPublisher::Publish(JobEntry& job, Turn& turn) {
  const bool later = job.has_attempt() && job.gang.size() > kPublishedAtOnceMax &&
                     turn.now() - job.ranks_published_at < kPublishInterval;
  if (!later) {
    job.ranks_published_at = turn.now();
    unpublished_.erase(job.id());
  } else {
    if (unpublished_.empty()) {
      deadlines_.Set({DeadlineKey::Kind::kPublish, ""}, turn.now() + kPublishInterval);
    }
    unpublished_.insert(job.id());
    // The rest is worth a publication of its own only where it became durable.
    if (!turn.persist().contains(job.id()) && !turn.changed().contains(job.id())) return;
  }
  turn.Act(JobChanged{job.id(), job.fixed.submit_sequence(), job.TakeChangedParts(!later)});
}

void JobPublisher::PublishLate(Turn& turn) {
  for (const JobId& id : std::exchange(unpublished_, {})) turn.Progressed(id);
}

}  // namespace muster::coordinator
