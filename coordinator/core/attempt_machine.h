// The states of one attempt (epoch) of a job. Every change of Attempt.state goes through Next().
#ifndef MUSTER_COORDINATOR_CORE_ATTEMPT_MACHINE_H_
#define MUSTER_COORDINATOR_CORE_ATTEMPT_MACHINE_H_

#include <array>
#include <cstddef>

#include "muster/v1/job.pb.h"
#include "muster/v1/session.pb.h"

namespace muster::coordinator {

//       +--------------------- kReplace ------------------+
//       v                                                 |
//   ALLOCATED --kAllPrepared--> PREPARED --kStart--> BOOTSTRAPPING --kAllTraining--> TRAINING
//       |                          |                      |                            |
//       | kStop                    | kStop                | kStop                      | kStop
//       +--------------------------+----------------------+----------------------------+
//                                                         v
//                                                     STOPPING --kAllReleased--> RELEASED
//
// With kReplace some ranks have other devices, and the membership of the attempt grows; while it is
// ALLOCATED, only the membership changes (membership.h).
//
// RELEASED means that every daemon has proven its devices free or is lost; the devices of a lost
// one are not used until it returns and proves it.
enum class AttemptEvent {
  kAllPrepared,
  kStart,
  kReplace,
  kAllTraining,
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
    AttemptTransition{v1::ATTEMPT_STATE_BOOTSTRAPPING, AttemptEvent::kReplace,
                      v1::ATTEMPT_STATE_ALLOCATED},
    AttemptTransition{v1::ATTEMPT_STATE_BOOTSTRAPPING, AttemptEvent::kStop,
                      v1::ATTEMPT_STATE_STOPPING},
    AttemptTransition{v1::ATTEMPT_STATE_TRAINING, AttemptEvent::kStop, v1::ATTEMPT_STATE_STOPPING},
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

// What holds while an attempt is in a state.
struct AttemptProperties {
  v1::AttemptState state;
  bool up;                 // no stop was decided: its keys, ranks and progress count
  bool trained;            // all of its ranks were training at some time
  v1::DesiredPhase asked;  // of its daemons
};

constexpr std::array kAttemptProperties = {
    AttemptProperties{v1::ATTEMPT_STATE_ALLOCATED, true, false, v1::DESIRED_PHASE_PREPARED},
    AttemptProperties{v1::ATTEMPT_STATE_PREPARED, true, false, v1::DESIRED_PHASE_RUNNING},
    AttemptProperties{v1::ATTEMPT_STATE_BOOTSTRAPPING, true, false, v1::DESIRED_PHASE_RUNNING},
    AttemptProperties{v1::ATTEMPT_STATE_TRAINING, true, true, v1::DESIRED_PHASE_RUNNING},
    // Whether it trained is known when it is stopped, not afterwards.
    AttemptProperties{v1::ATTEMPT_STATE_STOPPING, false, false, v1::DESIRED_PHASE_STOPPED},
    AttemptProperties{v1::ATTEMPT_STATE_RELEASED, false, false, v1::DESIRED_PHASE_STOPPED},
};

// Of a job that has no attempt yet: those of RELEASED.
constexpr AttemptProperties PropertiesOf(v1::AttemptState state) {
  for (const AttemptProperties& row : kAttemptProperties) {
    if (row.state == state) return row;
  }
  return kAttemptProperties.back();
}

// The process of the rank has ended, or it never runs.
constexpr bool HasEnded(v1::RankState state) {
  return state == v1::RANK_STATE_EXITED || state == v1::RANK_STATE_RELEASED ||
         state == v1::RANK_STATE_LOST;
}

// The rank is accounted for: nothing waits for it any more.
constexpr bool IsGone(v1::RankState state) {
  return state == v1::RANK_STATE_RELEASED || state == v1::RANK_STATE_LOST;
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_ATTEMPT_MACHINE_H_
