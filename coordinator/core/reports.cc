#include "coordinator/core/reports.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/core/identity.h"
#include "coordinator/core/limits.h"

namespace muster::coordinator {
namespace {

bool HoldsProcesses(const v1::ObservedAttempt& attempt) {
  return std::any_of(attempt.ranks().begin(), attempt.ranks().end(),
                     [](const v1::ObservedRank& rank) { return !IsGone(rank.state()); });
}

}  // namespace

void Reports::Apply(WorkerEntry& worker, const v1::Observed& observed, bool hello, Turn& turn) {
  const std::string& name = worker.row.name();
  std::set<JobId> absent = worker.Jobs();
  std::set<std::string> stale;
  worker.foreign_attempts.clear();
  worker.observed.clear();
  for (const v1::ObservedAttempt& attempt : observed.attempts()) {
    const JobId id(attempt.job_id());
    RaiseEpochFloor(worker, id, attempt.epoch(), turn);
    JobEntry* job = worker.Jobs().count(id) > 0 ? jobs_.Find(id) : nullptr;
    const bool current = job != nullptr && job->epoch().value() == attempt.epoch();
    const bool foreign = current && Differ(attempt.history_id(), job->attempt.history_id());
    if (foreign) worker.foreign_attempts.emplace(id, job->epoch());
    if (!current || foreign) {
      if (HoldsProcesses(attempt)) {
        stale.insert(absl::StrCat("job ", attempt.job_id(), " epoch ", attempt.epoch()));
      }
      continue;
    }
    absent.erase(id);
    worker.observed.emplace(std::make_pair(id, job->epoch()), attempt.has_spec());
    if (!attempts_.IsOfMembership(*job, name, attempt, turn)) continue;
    for (const v1::ObservedRank& rank : attempt.ranks()) {
      attempts_.ApplyRank(*job, name, rank, turn);
    }
    if (!attempt.refusal().empty() && job->up()) {
      const v1::Cause cause = attempt.refusal_cause() == v1::CAUSE_UNSPECIFIED
                                  ? v1::CAUSE_LAUNCH
                                  : attempt.refusal_cause();
      attempts_.ReplaceOrStop(
          *job, name,
          {cause, absl::StrCat("worker ", name, ": ", Bounded(attempt.refusal())), -1, -1, false,
           false, name},
          Departure::kToBeProven, turn);
      continue;
    }
    attempts_.Advance(*job, name, turn);
  }
  for (const JobId& id : absent) {
    attempts_.ApplyAbsent(worker, *jobs_.Find(id), observed.applied_revision(), hello, turn);
  }
  if (stale != worker.stale_attempts) {
    worker.stale_attempts = std::move(stale);
    workers_.Refresh(worker);
    turn.Reschedule();
  }
  if (worker.specs_wait) turn.DesiredChanged(worker.id());  // there may be room for them now
  // The Desired may have been lost although its stream is up: it is sent again.
  if (!hello && worker.desired.Applied(observed.applied_revision(), 2 * config_.heartbeat_interval,
                                       turn.now())) {
    turn.DesiredChanged(worker.id());
  }
}

// Only after the state was restored from a backup can a daemon hold an epoch that is not known
// here. It must not be used again. Until the job has begun its first epoch after a restore, any
// worker may have had it; else a worker that has never had a rank of the job says what cannot be.
void Reports::RaiseEpochFloor(const WorkerEntry& worker, const JobId& id, uint64_t epoch,
                              Turn& turn) {
  JobEntry* job = jobs_.Find(id);
  if (job == nullptr || epoch <= job->epoch().value() || epoch < job->state.epoch_floor() ||
      epoch > job->epoch().value() + kEpochsAheadMax) {
    return;
  }
  const std::string& name = worker.row.name();
  const auto& past = job->past_attempts;
  const bool had_rank = HasRank(job->attempt, name) || job->Leaves(name) ||
                        std::any_of(past.begin(), past.end(), [&name](const auto& attempt) {
                          return HasRank(attempt, name);
                        });
  if (!had_rank && job->state.epoch_floor() <= job->epoch().value()) return;
  job->state.set_epoch_floor(epoch + 1);
  turn.Persist(id);
}

}  // namespace muster::coordinator
