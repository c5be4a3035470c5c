// The handling of one event: collects what must become durable and which actions follow.
#ifndef MUSTER_COORDINATOR_CORE_TURN_H_
#define MUSTER_COORDINATOR_CORE_TURN_H_

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/core/core.h"
#include "coordinator/core/state_log.h"

namespace muster::coordinator {

// At most kMessageBytesMax bytes, cut between UTF-8 characters.
std::string Bounded(absl::string_view text);

// Numbers the rows of the event log. Owned by the core; outlives every Turn.
class EventLog {
 public:
  uint64_t last_sequence() const { return last_; }
  void Recover(uint64_t last) { last_ = last; }

 private:
  friend class Turn;
  uint64_t last_ = 0;
};

class Turn {
 public:
  // `actor`: Event.actor.
  Turn(absl::Time now, std::string actor, EventLog& log, StateLog& state_log)
      : now_(now), actor_(std::move(actor)), log_(log), state_log_(state_log) {}

  absl::Time now() const { return now_; }
  Batch& batch() { return output_.batch; }
  void Act(CoreAction action) { output_.actions.push_back(std::move(action)); }
  // What this turn answers a call; null when it does not.
  const ReplyAction* ReplyTo(CallId call) const;
  // Gives the event its sequence and time and appends it to the log.
  void Log(v1::Event event);
  // The row of this job changed and becomes durable with this turn. Watchers are told.
  void Persist(const JobId& job) { persist_.insert(job); }
  // Only the progress of this job changed: it may become durable later. Watchers are told.
  void Progressed(const JobId& job) { progressed_.insert(job); }
  // Only what can be derived again changed (why the job waits): it need not become durable.
  // Watchers are told.
  void Changed(const JobId& job) { changed_.insert(job); }
  // The attempts that this worker should hold, or their phases, may have changed.
  void DesiredChanged(const WorkerId& worker) { desired_changed_.insert(worker); }
  // Ranks of a job's attempt on this worker are accounted for, or the attempt was stopped: the turn
  // frees their slots, and ends the attempt when no rank is left.
  void FreeSlots(const JobId& job, const std::string& worker) { released_.emplace(job, worker); }
  // What the turn's entry of the log of changes has beside the changes.
  v1::LogEntry& log_entry() { return log_entry_; }
  // Slots, workers or the queue changed: the turn ends with a new plan.
  void Reschedule() { reschedule_ = true; }

  const std::set<JobId>& persist() const { return persist_; }
  const std::set<JobId>& progressed() const { return progressed_; }
  const std::set<JobId>& changed() const { return changed_; }
  const std::set<WorkerId>& desired_changed() const { return desired_changed_; }
  // What FreeSlots() was called for since the last call.
  std::set<std::pair<JobId, std::string>> TakeReleased() { return std::exchange(released_, {}); }
  const std::set<std::pair<JobId, std::string>>& released() const { return released_; }
  // True once per Reschedule().
  bool TakeReschedule() { return std::exchange(reschedule_, false); }
  // Adds the sequence of the last event and the entry of the log of changes. Ends the turn.
  CoreOutput Finish();

 private:
  const absl::Time now_;
  const std::string actor_;
  EventLog& log_;
  StateLog& state_log_;
  CoreOutput output_;
  v1::LogEntry log_entry_;
  std::set<JobId> persist_;
  std::set<JobId> progressed_;
  std::set<JobId> changed_;
  std::set<WorkerId> desired_changed_;
  std::set<std::pair<JobId, std::string>> released_;
  bool reschedule_ = false;
  bool logged_ = false;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_TURN_H_
