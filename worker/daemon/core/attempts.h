// The attempts that this worker holds, with the state of every rank.
#ifndef MUSTER_WORKER_DAEMON_CORE_ATTEMPTS_H_
#define MUSTER_WORKER_DAEMON_CORE_ATTEMPTS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "muster/v1/daemon_state.pb.h"
#include "muster/v1/rank.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/core/keys.h"
#include "worker/daemon/core/outbox.h"

namespace muster::worker {

struct RankState {
  v1::StoredRank stored;  // what is durable
  // Of the newest Desired; empty after a restart until one comes and the spec is known.
  v1::RankAssignment assignment;
  v1::RankProgress progress;
  bool attaching = false;             // AttachRank is under way: start and signal nothing yet
  std::optional<absl::Time> kill_at;  // when SIGTERM was sent: when SIGKILL follows
  bool killed = false;                // SIGKILL was sent
  // The membership of the assignment in its run directory, as far as this daemon knows; whether a
  // newer one is being written there.
  uint32_t told_membership = 1;
  bool reassigning = false;
  uint64_t collectives = 0;  // the newest record that somebody asked for; 0: nobody has
};

struct AttemptState {
  v1::StoredAttempt stored;  // what is durable, but for the ranks
  std::map<int32_t, RankState> ranks;
  // Of the newest Desired that had them, since each need not; no value: none in this process.
  std::optional<v1::JobSpec> spec;
  google::protobuf::RepeatedPtrField<v1::CheckpointRecord> restore;
  bool prepared_asked = false;  // PrepareAttempt is under way or done in this process

  uint32_t membership() const { return std::max<uint32_t>(1, stored.membership()); }
  // Its ranks are to end: it is not wanted any more, or the coordinator stops it.
  bool ending() const { return stored.stale() || stored.phase() == v1::DESIRED_PHASE_STOPPED; }
};

// What the rank takes of its device, in thousandths.
int32_t ShareOf(const v1::StoredRank& rank);
// A process of the rank may be running.
bool Started(const RankState& rank);
// The rank has ended, or never ran and never will.
bool Exited(const RankState& rank);
// What the coordinator is told of the rank.
v1::RankState ReportedState(const RankState& rank);
// The same, had it not ended: training once it is past its bootstrap, else running.
v1::RankState RunningState(const RankState& rank);

// Thread: the core's.
class AttemptTable {
 public:
  static constexpr char kRecordPrefix[] = "attempt.";

  // Takes a record of an earlier daemon. False: it cannot be read.
  bool Load(const std::string& record);

  // In order of job and epoch. A caller that changes what is stored calls MarkChanged.
  std::map<AttemptKey, AttemptState>& all() { return attempts_; }
  const std::map<AttemptKey, AttemptState>& all() const { return attempts_; }
  // Null when it is not held.
  AttemptState* Find(const AttemptKey& key);
  RankState* Find(const RankKey& key);
  const RankState* Find(const RankKey& key) const;

  void MarkChanged(const AttemptKey& key) { changed_.insert(key); }
  // Writes the record of every attempt that has changed, or deletes it when it is held no more.
  // Returns whether there was any.
  bool WriteChanged(Outbox& outbox);

  // Whether ranks may still be using so much of the device that this one, which does not run, has
  // no room on it: what a rank takes is free only when its release is proven.
  bool DeviceBusy(const v1::StoredRank& rank) const;
  // Devices of which ranks hold more than there is, which must never be; empty when sound.
  std::vector<std::string> CheckInvariants() const;

 private:
  std::map<AttemptKey, AttemptState> attempts_;
  std::set<AttemptKey> changed_;  // since the last WriteChanged
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_CORE_ATTEMPTS_H_
