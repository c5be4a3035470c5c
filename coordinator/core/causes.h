// What each cause of an attempt's end costs, and how long to wait before the next attempt. Pure.
#ifndef MUSTER_COORDINATOR_CORE_CAUSES_H_
#define MUSTER_COORDINATOR_CORE_CAUSES_H_

#include <string>

#include "absl/time/time.h"
#include "muster/v1/job.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

enum class Budget {
  kNotRetried,  // trying again cannot help: the job fails
  kCounted,     // against restart.max_failures, unless the attempt advanced the committed step
  kFree,        // the job is not to blame
};

// `trained`: the attempt had all ranks training. STORAGE before that is not retried (the path is
// wrong), nor is OUT_OF_MEMORY (a rank was refused what it needs, or ended in taking it);
// afterwards they are counted (the disk filled up; something else took the machine's memory).
Budget BudgetOf(v1::Cause cause, bool trained);

// True for causes that only tell that some other rank vanished.
inline bool IsSymptom(v1::Cause cause) { return cause == v1::CAUSE_COMMUNICATION; }

// initial x 2^(restarts_in_a_row - 1), at most max. Nothing for causes such as preemption, where
// waiting helps nobody. Requires: restarts_in_a_row >= 1.
absl::Duration BackoffBefore(const v1::BackoffSpec& spec, v1::Cause cause, int restarts_in_a_row);

// "out of memory", "worker lost": lower case words of the enum's name.
std::string CauseName(v1::Cause cause);
// "running"; the enum's name without its prefix, lower case.
std::string StateName(v1::JobState state);
std::string StateName(v1::AttemptState state);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_CAUSES_H_
