// What the states of a job mean, for every program that reads them.
#ifndef MUSTER_PROTO_JOB_STATE_H_
#define MUSTER_PROTO_JOB_STATE_H_

#include "muster/v1/job.pb.h"

namespace muster {

// True of the states that a job never leaves: SUCCEEDED, FAILED and CANCELLED.
constexpr bool IsFinal(v1::JobState state) {
  return state == v1::JOB_STATE_SUCCEEDED || state == v1::JOB_STATE_FAILED ||
         state == v1::JOB_STATE_CANCELLED;
}

}  // namespace muster

#endif  // MUSTER_PROTO_JOB_STATE_H_
