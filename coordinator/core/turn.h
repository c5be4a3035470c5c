// The handling of one event: what it is to make durable and what is to follow.
#ifndef MUSTER_COORDINATOR_CORE_TURN_H_
#define MUSTER_COORDINATOR_CORE_TURN_H_

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "coordinator/core/core.h"
#include "google/protobuf/timestamp.pb.h"

namespace muster::coordinator {

google::protobuf::Timestamp ToProto(absl::Time time);
absl::Time FromProto(const google::protobuf::Timestamp& timestamp);
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
  Turn(absl::Time now, EventLog& log) : now_(now), log_(log) {}

  absl::Time now() const { return now_; }
  Batch& batch() { return output_.batch; }
  void Act(CoreAction action) { output_.actions.push_back(std::move(action)); }
  // Gives the event its sequence and time and appends it to the log.
  void Log(v1::Event event);
  // The row of this job changed and is to be durable with this turn.
  void Persist(const JobId& job) { persist_.insert(job); }
  // Only its progress did: watchers are told, durability may wait.
  void Progressed(const JobId& job) { progressed_.insert(job); }
  // What can be worked out again did: watchers are told, nothing is to be durable.
  void Show(const JobId& job) { shown_.insert(job); }
  // The desired state of this worker may have changed.
  void Redirect(const WorkerId& worker) { redirect_.insert(worker); }
  // Slots, workers or the queue changed.
  void Reschedule() { reschedule_ = true; }

  const std::set<JobId>& persist() const { return persist_; }
  const std::set<JobId>& progressed() const { return progressed_; }
  const std::set<JobId>& shown() const { return shown_; }
  const std::set<WorkerId>& redirect() const { return redirect_; }
  // True once per Reschedule().
  bool TakeReschedule() { return std::exchange(reschedule_, false); }
  // Appends the bookkeeping rows; the turn is over.
  CoreOutput Finish();

 private:
  const absl::Time now_;
  EventLog& log_;
  CoreOutput output_;
  std::set<JobId> persist_;
  std::set<JobId> progressed_;
  std::set<JobId> shown_;
  std::set<WorkerId> redirect_;
  bool reschedule_ = false;
  bool logged_ = false;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_TURN_H_
