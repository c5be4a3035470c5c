// What the daemon of a worker was told to hold, in its current session.
#ifndef MUSTER_COORDINATOR_CORE_DESIRED_LIST_H_
#define MUSTER_COORDINATOR_CORE_DESIRED_LIST_H_

#include <cstdint>
#include <map>

#include "absl/time/time.h"
#include "base/ids.h"
#include "muster/v1/session.pb.h"

namespace muster::coordinator {

// The attempts of the newest Desired, and the revision from which on each was listed. Revisions
// grow by one with every difference, and an attempt that was listed as STOPPED stays so. Only what
// a daemon was told can be proven by what it does not report. Value type; a new session has a new
// one.
class DesiredList {
 public:
  struct Attempt {
    Epoch epoch;
    v1::DesiredPhase phase = v1::DESIRED_PHASE_UNSPECIFIED;
    absl::Duration stop_grace;
    uint32_t membership = 1;
    bool described = false;  // with its spec, which the daemon needs
  };

  // The worker should hold these attempts now. True: Desired is to be sent, since it differs from
  // the one before, is the first, or was lost (Applied).
  bool Update(const std::map<JobId, Attempt>& wanted);
  // The list was sent.
  void Sent(absl::Time now) { sent_at_ = now; }
  // The daemon has applied the list up to this revision. True: the newest one was sent `patience`
  // ago or earlier and seems lost, so that the next Update() asks for it again.
  bool Applied(uint64_t revision, absl::Duration patience, absl::Time now);

  // Whether the daemon knew of the attempt, or, of one that is `stopping`, that it was stopped,
  // when it had applied this revision: if it does not hold the attempt, that is then gone.
  bool Knew(const JobId& job, Epoch epoch, bool stopping, uint64_t applied) const;

  // The attempt as the newest list has it; null where it has not.
  const Attempt* Find(const JobId& job, Epoch epoch) const;

  uint64_t revision() const { return revision_; }  // 0: nothing was sent

 private:
  struct Listed {
    Attempt attempt;
    uint64_t since = 0;          // first revision that lists the attempt
    uint64_t stopped_since = 0;  // first revision that lists it as STOPPED; 0 = none
  };

  uint64_t revision_ = 0;
  absl::Time sent_at_;
  bool lost_ = false;
  std::map<JobId, Listed> listed_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_DESIRED_LIST_H_
