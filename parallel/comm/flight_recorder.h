// Records a rank's newest collectives, to show what they were doing when something went wrong. A
// hang of one rank shows in the others' records: the first unfinished call of each group is what
// they wait for, and the rank whose record ends before that call is the one to look at.
#ifndef MUSTER_PARALLEL_COMM_FLIGHT_RECORDER_H_
#define MUSTER_PARALLEL_COMM_FLIGHT_RECORDER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/mutex.h"
#include "kernels/device/device.h"
#include "kernels/device/trace.h"
#include "parallel/comm/communicator.h"

namespace muster::parallel {

// The newest collectives of one rank, over all of its groups. Thread-safe; costs one recorded event
// per call.
class FlightRecorder {
 public:
  static constexpr size_t kCallsMax = 1000;

  enum class State { kUnfinished, kFinished, kFailed };
  struct Call {
    uint64_t number = 0;  // in its group, from 0
    std::string group;    // its name: "tp"
    // Names the group by the splits that it came from: the same on all its ranks, and no other's.
    std::string path;
    const char* operation = "";
    kernels::DType dtype = kernels::DType::kU8;
    int64_t elements = 0;
    int peer = -1;  // of a send, receive or broadcast, by its rank in the group
    absl::Time enqueued;
    State state = State::kUnfinished;
    int64_t bytes() const { return elements * kernels::SizeOf(dtype); }
  };

  explicit FlightRecorder(size_t calls_max = kCallsMax);

  // Hands all calls to `communicator`, and records them and those of groups split from it.
  static std::unique_ptr<Communicator> Record(std::unique_ptr<Communicator> communicator,
                                              std::shared_ptr<FlightRecorder> recorder);

  // From now on, calls that finish on host streams are also spans of `trace`, on a track of their
  // group, from the moment when they were enqueued; null ends that. (The device's own trace has
  // CUDA's calls.)
  void SetTrace(std::shared_ptr<kernels::Trace> trace);
  // Calls that are unfinished now stay so: a communicator that fails ends them, which would make
  // them look finished. Later calls of Freeze do nothing.
  void Freeze();
  // Oldest first.
  std::vector<Call> Calls() const;
  // A line per call, oldest first: number of the call in its group, group, operation, dtype and
  // elements, bytes, peer, when it was enqueued, and its state (finished, failed, unfinished).
  std::string Dump() const;
  // Where the calls of each group are, by path.
  struct Position {
    std::string group;
    uint64_t calls = 0;              // made so far, also those that are not recorded any more
    std::optional<Call> unfinished;  // the oldest one, or one that has failed
  };
  std::map<std::string, Position> Positions() const;
  // The first unfinished call of each group on one line; empty when there is none.
  std::string Unfinished() const;

 private:
  friend class RecordedCommunicator;
  struct Entry : Call {
    // Recorded behind a call on a CUDA stream, once `followed`; host streams set `state` instead.
    std::unique_ptr<kernels::Event> done;
    bool followed = false;
  };

  // Returns the entry's id.
  uint64_t Begin(const std::string& group, const std::string& path, const char* operation,
                 const kernels::Tensor& data, int peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // Watches for the end of a call that has just been enqueued on `stream`.
  static void Follow(const std::shared_ptr<FlightRecorder>& recorder, uint64_t id,
                     kernels::Stream& stream);
  void Finish(uint64_t id, State state) ABSL_LOCKS_EXCLUDED(mutex_);
  Entry* Find(uint64_t id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static State StateOf(const Entry& entry, bool frozen);
  static std::string Line(const Call& call, State state);

  const size_t calls_max_;
  mutable Mutex mutex_;
  bool frozen_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<kernels::Trace> trace_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, uint64_t> calls_ ABSL_GUARDED_BY(mutex_);  // by path
  std::deque<Entry> entries_ ABSL_GUARDED_BY(mutex_);              // ids next_id_ - size() ...
};

}  // namespace muster::parallel

#endif  // MUSTER_PARALLEL_COMM_FLIGHT_RECORDER_H_
