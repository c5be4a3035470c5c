// The states of one attempt (epoch) of a job. Every change of Attempt.state goes through Next().
#ifndef MUSTER_COORDINATOR_CORE_ATTEMPT_MACHINE_H_
#define MUSTER_COORDINATOR_CORE_ATTEMPT_MACHINE_H_

#include <array>
#include <cstddef>

#include "muster/v1/job.pb.h"

namespace muster::coordinator {

//   ALLOCATED --kAllPrepared--> PREPARED --kStart--> BOOTSTRAPPING --kAllTraining--> TRAINING
//       |                          |                      |                           |  |
//       |                          |                      |                   kQuiesce|  |
//       |                          |                      |                           v  |
//       |                          |                      |                   QUIESCING  |
//       |  kStop                   | kStop                | kStop          kStop  |      | kStop
//       +--------------------------+----------------------+-----------------------+------+
//                                                         v
//                                                     STOPPING --kAllReleased--> RELEASED
//
// The phase that daemons are asked for is PREPARED in ALLOCATED; RUNNING in PREPARED, BOOTSTRAPPING
// and TRAINING; STOPPED in QUIESCING and STOPPING. RELEASED means that every daemon has proven its
// devices free or is lost; the devices of a lost one are not used until it returns and proves it.
enum class AttemptEvent {
  kAllPrepared,
  kStart,
  kAllTraining,
  kQuiesce,
  kStop,
  kAllReleased,
};
constexpr size_t kAttemptEventCount = 6;
constexpr size_t kAttemptStateCount = v1::AttemptState_ARRAYSIZE;

struct AttemptTransition {
  v1::AttemptState from;
  AttemptEvent event;
  v1::AttemptState to;
};

constexpr std::array kAttemptTransitions = {
    AttemptTransition{v1::ATTEMPT_STATE_ALLOCATED, AttemptEvent::kAllPrepared,
                      v1::ATTEMPT_STATE_PREPARED},
    AttemptTransition{v1::ATTEMPT_STATE_ALLOCATED, AttemptEvent::kStop, v1::ATTEMPT_STATE_STOPPING},
    AttemptTransition{v1::ATTEMPT_STATE_PREPARED, AttemptEvent::kStart,
                      v1::ATTEMPT_STATE_BOOTSTRAPPING},
    AttemptTransition{v1::ATTEMPT_STATE_PREPARED, AttemptEvent::kStop, v1::ATTEMPT_STATE_STOPPING},
    AttemptTransition{v1::ATTEMPT_STATE_BOOTSTRAPPING, AttemptEvent::kAllTraining,
                      v1::ATTEMPT_STATE_TRAINING},
    AttemptTransition{v1::ATTEMPT_STATE_BOOTSTRAPPING, AttemptEvent::kStop,
                      v1::ATTEMPT_STATE_STOPPING},
    AttemptTransition{v1::ATTEMPT_STATE_TRAINING, AttemptEvent::kQuiesce,
                      v1::ATTEMPT_STATE_QUIESCING},
    AttemptTransition{v1::ATTEMPT_STATE_TRAINING, AttemptEvent::kStop, v1::ATTEMPT_STATE_STOPPING},
    AttemptTransition{v1::ATTEMPT_STATE_QUIESCING, AttemptEvent::kStop, v1::ATTEMPT_STATE_STOPPING},
    AttemptTransition{v1::ATTEMPT_STATE_STOPPING, AttemptEvent::kAllReleased,
                      v1::ATTEMPT_STATE_RELEASED},
};

// ATTEMPT_STATE_UNSPECIFIED: the event must not happen in this state.
constexpr v1::AttemptState Next(v1::AttemptState state, AttemptEvent event) {
  for (const AttemptTransition& row : kAttemptTransitions) {
    if (row.from == state && row.event == event) return row.to;
  }
  return v1::ATTEMPT_STATE_UNSPECIFIED;
}

// True until a stop is decided: until then the attempt's keys, ranks and progress count.
constexpr bool IsUp(v1::AttemptState state) {
  return state >= v1::ATTEMPT_STATE_ALLOCATED && state <= v1::ATTEMPT_STATE_TRAINING;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_ATTEMPT_MACHINE_H_
