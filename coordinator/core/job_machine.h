// The states of a job. Every change of Job.state goes through Next().
#ifndef MUSTER_COORDINATOR_CORE_JOB_MACHINE_H_
#define MUSTER_COORDINATOR_CORE_JOB_MACHINE_H_

#include <array>
#include <cstddef>

#include "muster/v1/job.pb.h"

namespace muster::coordinator {

//                     kPlaced            kLaunched           kTraining
//   PENDING -> QUEUED --------> PLACING ----------> STARTING ----------> RUNNING
//      |         ^  |              |                   |                    |
//      |  kRetry |  |              | kAttemptFailed    | kAttemptFailed     | kAttemptFailed
//      |         |  |              v                   v                    v
//      |        RECOVERING <----------------------------------------------- +
//      |         |  |                                                       | kCompleted
//      |         |  +--- kGivenUp ---> FAILED                               v
//      | kCancel | kCancel (while its devices are being released)      SUCCEEDED
//      v         v
//   CANCELLED <- STOPPING <--- kCancel --- PLACING, STARTING, RUNNING
//      kReleased
//
//   STARTING --- kReplaced ---> PLACING
//   PLACING, STARTING, RUNNING --- kPreempt ---> PREEMPTING --- kYielded ---> QUEUED
//   PLACING, STARTING, RUNNING --- kResize ----> RESIZING ----- kYielded ---> QUEUED
//   QUEUED, RECOVERING, PREEMPTING, RESIZING --- kHold ---> HELD --- kUnhold ---> QUEUED
//
// A cancelled job waits in STOPPING for the proof that its devices are free; without an attempt it
// is CANCELLED at once (kCancelIdle). kCompleted, kGivenUp, kYielded and kHold, too, come after
// that proof. A job whose dependencies cannot hold any more, or whose deadline has passed, goes
// from QUEUED or HELD to FAILED (kCannotStart).
enum class JobEvent {
  kAdmitted,  // durable, joins its queue
  kPlaced,    // an attempt was allocated
  kLaunched,  // every daemon accepted the attempt
  kReplaced,  // ranks of the attempt have other devices, whose daemons have not accepted it yet
  kTraining,  // every rank joined its communicators
  kAttemptFailed,  // an attempt ends early and is being released
  kRetry,          // released and the back-off is over
  kGivenUp,        // released, not to be retried
  kCannotStart,    // a job that it was to follow has ended in another way, or its deadline passed
  kCompleted,      // released after all ranks had finished
  kCancel,         // cancelled with a live attempt
  kCancelIdle,     // cancelled without one
  kReleased,       // the attempt of a cancelled job is released
  kPreempt,        // asked to stop for another job, or by a user
  kResize,         // asked to stop, to go on with another number of ranks
  kYielded,        // released after one of these
  kHold,           // without an attempt, and kept from getting one
  kUnhold,         // that ends
};
constexpr size_t kJobEventCount = 18;
constexpr size_t kJobStateCount = v1::JobState_ARRAYSIZE;

struct JobTransition {
  v1::JobState from;
  JobEvent event;
  v1::JobState to;
};

constexpr std::array kJobTransitions = {
    JobTransition{v1::JOB_STATE_PENDING, JobEvent::kAdmitted, v1::JOB_STATE_QUEUED},
    JobTransition{v1::JOB_STATE_PENDING, JobEvent::kCancelIdle, v1::JOB_STATE_CANCELLED},
    JobTransition{v1::JOB_STATE_QUEUED, JobEvent::kPlaced, v1::JOB_STATE_PLACING},
    JobTransition{v1::JOB_STATE_QUEUED, JobEvent::kCancelIdle, v1::JOB_STATE_CANCELLED},
    JobTransition{v1::JOB_STATE_QUEUED, JobEvent::kCannotStart, v1::JOB_STATE_FAILED},
    JobTransition{v1::JOB_STATE_PLACING, JobEvent::kLaunched, v1::JOB_STATE_STARTING},
    JobTransition{v1::JOB_STATE_PLACING, JobEvent::kAttemptFailed, v1::JOB_STATE_RECOVERING},
    JobTransition{v1::JOB_STATE_PLACING, JobEvent::kCancel, v1::JOB_STATE_STOPPING},
    JobTransition{v1::JOB_STATE_STARTING, JobEvent::kReplaced, v1::JOB_STATE_PLACING},
    JobTransition{v1::JOB_STATE_STARTING, JobEvent::kTraining, v1::JOB_STATE_RUNNING},
    JobTransition{v1::JOB_STATE_STARTING, JobEvent::kAttemptFailed, v1::JOB_STATE_RECOVERING},
    JobTransition{v1::JOB_STATE_STARTING, JobEvent::kCancel, v1::JOB_STATE_STOPPING},
    JobTransition{v1::JOB_STATE_RUNNING, JobEvent::kAttemptFailed, v1::JOB_STATE_RECOVERING},
    JobTransition{v1::JOB_STATE_RUNNING, JobEvent::kCompleted, v1::JOB_STATE_SUCCEEDED},
    JobTransition{v1::JOB_STATE_RUNNING, JobEvent::kCancel, v1::JOB_STATE_STOPPING},
    JobTransition{v1::JOB_STATE_RECOVERING, JobEvent::kRetry, v1::JOB_STATE_QUEUED},
    JobTransition{v1::JOB_STATE_RECOVERING, JobEvent::kGivenUp, v1::JOB_STATE_FAILED},
    JobTransition{v1::JOB_STATE_RECOVERING, JobEvent::kCancel, v1::JOB_STATE_STOPPING},
    JobTransition{v1::JOB_STATE_RECOVERING, JobEvent::kCancelIdle, v1::JOB_STATE_CANCELLED},
    JobTransition{v1::JOB_STATE_STOPPING, JobEvent::kReleased, v1::JOB_STATE_CANCELLED},
    JobTransition{v1::JOB_STATE_PLACING, JobEvent::kPreempt, v1::JOB_STATE_PREEMPTING},
    JobTransition{v1::JOB_STATE_STARTING, JobEvent::kPreempt, v1::JOB_STATE_PREEMPTING},
    JobTransition{v1::JOB_STATE_RUNNING, JobEvent::kPreempt, v1::JOB_STATE_PREEMPTING},
    JobTransition{v1::JOB_STATE_PREEMPTING, JobEvent::kYielded, v1::JOB_STATE_QUEUED},
    JobTransition{v1::JOB_STATE_PREEMPTING, JobEvent::kCompleted, v1::JOB_STATE_SUCCEEDED},
    JobTransition{v1::JOB_STATE_PREEMPTING, JobEvent::kCancel, v1::JOB_STATE_STOPPING},
    JobTransition{v1::JOB_STATE_PREEMPTING, JobEvent::kHold, v1::JOB_STATE_HELD},
    JobTransition{v1::JOB_STATE_PLACING, JobEvent::kResize, v1::JOB_STATE_RESIZING},
    JobTransition{v1::JOB_STATE_STARTING, JobEvent::kResize, v1::JOB_STATE_RESIZING},
    JobTransition{v1::JOB_STATE_RUNNING, JobEvent::kResize, v1::JOB_STATE_RESIZING},
    JobTransition{v1::JOB_STATE_RESIZING, JobEvent::kYielded, v1::JOB_STATE_QUEUED},
    JobTransition{v1::JOB_STATE_RESIZING, JobEvent::kCompleted, v1::JOB_STATE_SUCCEEDED},
    JobTransition{v1::JOB_STATE_RESIZING, JobEvent::kCancel, v1::JOB_STATE_STOPPING},
    JobTransition{v1::JOB_STATE_RESIZING, JobEvent::kHold, v1::JOB_STATE_HELD},
    JobTransition{v1::JOB_STATE_QUEUED, JobEvent::kHold, v1::JOB_STATE_HELD},
    JobTransition{v1::JOB_STATE_RECOVERING, JobEvent::kHold, v1::JOB_STATE_HELD},
    JobTransition{v1::JOB_STATE_HELD, JobEvent::kUnhold, v1::JOB_STATE_QUEUED},
    JobTransition{v1::JOB_STATE_HELD, JobEvent::kCancelIdle, v1::JOB_STATE_CANCELLED},
    JobTransition{v1::JOB_STATE_HELD, JobEvent::kCannotStart, v1::JOB_STATE_FAILED},
};

// JOB_STATE_UNSPECIFIED: the event must not happen in this state.
constexpr v1::JobState Next(v1::JobState state, JobEvent event) {
  for (const JobTransition& row : kJobTransitions) {
    if (row.from == state && row.event == event) return row.to;
  }
  return v1::JOB_STATE_UNSPECIFIED;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_JOB_MACHINE_H_
