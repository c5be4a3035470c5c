// Runs the same work on a stream many times: it is enqueued op by op at first, then recorded and
// run as a whole (on CUDA, a graph), which leaves shorter gaps between kernels and costs the host
// one call instead of a thousand.
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
  // Identifies the work: the addresses and numbers that it depends on.
  using Key = std::vector<uint64_t>;

  explicit Replay(Stream& stream) : stream_(stream) {}

  // Runs what `work` enqueues on the stream. True when `work` was called, once or (where recording
  // failed) twice; false when its recording ran instead. The first call for a key only enqueues, so
  // that the work can measure and allocate what it needs. `work` must enqueue the same ops on the
  // same memory whenever the key is the same, on this stream alone, and have no effect on the host
  // that a second call would repeat.
  bool Run(const Key& key, absl::FunctionRef<void()> work);

  // How many recordings exist now: 0 on streams that cannot record.
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
