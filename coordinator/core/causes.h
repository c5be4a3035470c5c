// How each cause of an attempt's end counts, and how long to wait before the next attempt. Pure.
#ifndef MUSTER_COORDINATOR_CORE_CAUSES_H_
#define MUSTER_COORDINATOR_CORE_CAUSES_H_

#include <string>

#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

enum class Budget {
  kNotRetried,  // another attempt would end the same way: the job fails
  kCounted,     // counts against restart.max_failures, unless the committed step advanced
  kFree,        // the job is not the reason: does not count
};

// `trained`: all ranks of the attempt were training. Before that STORAGE is not retried (the path
// is wrong) and neither is OUT_OF_MEMORY (the ranks need more than there is); afterwards both count
// (the disk filled up, another program took the memory).
Budget BudgetOf(v1::Cause cause, bool trained);

// True of causes that only tell that some other rank vanished.
inline bool IsSymptom(v1::Cause cause) { return cause == v1::CAUSE_COMMUNICATION; }

// True of causes that are faults of the machines a job ran on: what recovers from one may take
// spares (SparePolicy).
constexpr bool IsFaultOfCluster(v1::Cause cause) {
  return cause == v1::CAUSE_DEVICE || cause == v1::CAUSE_WORKER_LOST ||
         cause == v1::CAUSE_NETWORK || cause == v1::CAUSE_HANG;
}

// initial x 2^(restarts_in_a_row - 1), at most max; 0 after a preemption, a resize or for
// maintenance. Requires: restarts_in_a_row >= 1.
absl::Duration BackoffBefore(const v1::BackoffSpec& spec, v1::Cause cause, int restarts_in_a_row);

// As words for a message: "out of memory", "worker lost".
std::string CauseText(v1::Cause cause);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CAUSES_H_
