// A job as plans of the scheduler see it: a function of its durable rows alone, so that a plan can
// be made again from them.
#ifndef MUSTER_COORDINATOR_CORE_PLANNED_JOB_H_
#define MUSTER_COORDINATOR_CORE_PLANNED_JOB_H_

#include <memory>

#include "absl/time/time.h"
#include "coordinator/core/job_entry.h"
#include "coordinator/core/reservations.h"
#include "coordinator/scheduler/preemption.h"
#include "coordinator/scheduler/running_jobs.h"
#include "coordinator/scheduler/waiting_queue.h"

namespace muster::coordinator {

WaitingJob AsWaiting(const JobEntry& job, const Reservations& reservations);
// Requires: it has an attempt.
RunningJob AsRunning(const JobEntry& job, const Reservations& reservations);
// How the job may be resized while it runs; null: not at all.
std::shared_ptr<const Elasticity> ElasticityOf(const JobEntry& job,
                                               const Reservations& reservations);
// RunningJob::saved_at.
absl::Time SavedAt(const JobEntry& job);

// What is left of its time_limit when it runs next, or runs on at `now`; InfiniteDuration: no
// limit.
absl::Duration LimitOf(const JobEntry& job, absl::Time now);
// How long the rest of it takes at the pace of its last attempt; InfiniteDuration: not known.
absl::Duration RestOf(const JobEntry& job);

// The slots that are kept for the job.
Kept KeptFor(const JobEntry& job);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_PLANNED_JOB_H_
