// What a rank's collectives were doing when something went wrong. A hang of one rank shows in the
// others' records: the first unfinished call of each group is what they wait for, and the rank
// whose record ends before that call is the one to look at.
#ifndef MUSTER_PARALLEL_COMM_FLIGHT_RECORDER_H_
#define MUSTER_PARALLEL_COMM_FLIGHT_RECORDER_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
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
    // The same on all ranks of the group and on no other: the splits that it came from.
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

  // `communicator`, with every call of it and of the groups split from it recorded here.
  static std::unique_ptr<Communicator> Record(std::unique_ptr<Communicator> communicator,
                                              std::shared_ptr<FlightRecorder> recorder);

  // From now on, calls that finish on host streams are also spans of `trace`, on a track of their
  // group, from the moment when they were enqueued; null ends that. (CUDA's are in the device's own
  // records.)
  void SetTrace(std::shared_ptr<kernels::Trace> trace);
  // Keeps what is unfinished now unfinished for good: communicators that end what is under way make
  // it look finished afterwards. The first time counts.
  void Freeze();
  // Oldest first.
  std::vector<Call> Calls() const;
  // A line per call, oldest first: number of the call in its group, group, operation, dtype and
  // elements, bytes, peer, when it was enqueued, and its state (finished, failed, unfinished).
  std::string Dump() const;
  // The first unfinished call of each group on one line; empty when there is none.
  std::string Unfinished() const;

 private:
  friend class RecordedCommunicator;
  struct Entry : Call {
    // Of a CUDA stream, once `followed`; work on a host stream reports to the entry itself.
    std::unique_ptr<kernels::Event> done;
    bool followed = false;
  };

  // Returns the entry's id.
  uint64_t Begin(const std::string& group, const std::string& path, const char* operation,
                 const kernels::Tensor& data, int peer) ABSL_LOCKS_EXCLUDED(mutex_);
  // After the call was enqueued on `stream`.
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
