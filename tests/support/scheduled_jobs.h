// Jobs as the scheduler sees them, for tests.
#ifndef MUSTER_TESTS_SUPPORT_SCHEDULED_JOBS_H_
#define MUSTER_TESTS_SUPPORT_SCHEDULED_JOBS_H_

#include <cstdint>
#include <string>

#include "absl/time/time.h"
#include "coordinator/scheduler/running_jobs.h"
#include "coordinator/scheduler/waiting_queue.h"

namespace muster::testing {

// A job of queue "default" with whole devices, whose id is its name; submitted behind those that
// were made before it.
inline coordinator::WaitingJob WaitingGang(const std::string& name, int ranks, int32_t priority) {
  static uint64_t sequence = 0;
  coordinator::WaitingJob job;
  job.id = JobId(name);
  job.name = name;
  job.queue = "default";
  job.ranks = ranks;
  job.priority = priority;
  job.submit_sequence = ++sequence;
  return job;
}

// What runs of it from `started` on, when it saves its work for the first time.
inline coordinator::RunningJob RunningGang(const coordinator::WaitingJob& job, absl::Time started) {
  coordinator::RunningJob running;
  running.name = job.name;
  running.queue = job.queue;
  running.priority = job.priority;
  running.ranks = job.ranks;
  running.share = job.share;
  running.tenant = job.tenant;
  running.started_at = running.saved_at = started;
  return running;
}

}  // namespace muster::testing

#endif  // MUSTER_TESTS_SUPPORT_SCHEDULED_JOBS_H_
