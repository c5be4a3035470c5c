// Runs the same work on a stream again and again: enqueued op by op at first, then recorded and run
// as a whole (on CUDA, a graph), which leaves shorter gaps between kernels and costs the host one
// call instead of a thousand.
#ifndef MUSTER_KERNELS_DEVICE_REPLAY_H_
#define MUSTER_KERNELS_DEVICE_REPLAY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/device/device.h"

namespace muster::kernels {

// Owns the recordings of one stream, which must outlive it. Single-threaded.
class Replay {
 public:
  // What tells one piece of work from another: addresses, numbers.
  using Key = std::vector<uint64_t>;

  explicit Replay(Stream& stream) : stream_(stream) {}

  // Does what `work` enqueues on the stream. True when `work` was called, once or (where recording
  // failed) twice; false when its recording ran. The first call for a key only enqueues: it
  // measures and allocates what the work needs. `work` must enqueue the same ops on the same memory
  // whenever the key is the same, on this stream alone, and leave no trace on the host that a
  // second call would double.
  bool Run(const Key& key, absl::FunctionRef<void()> work);

  // Those that are there now: 0 on streams that cannot record.
  int recordings() const;

 private:
  struct Entry {
    bool warm = false;
    bool gave_up = false;
    std::unique_ptr<RecordedWork> recorded;
  };

  Stream& stream_;
  std::map<Key, Entry> entries_;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_REPLAY_H_
