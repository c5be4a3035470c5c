// The spans of time that a profile consists of, written in Chrome's trace event format
// (https://chromium.googlesource.com/catapult, "Trace Event Format"), which Perfetto reads too.
#ifndef MUSTER_KERNELS_DEVICE_TRACE_H_
#define MUSTER_KERNELS_DEVICE_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace muster::kernels {

// Thread-safe. Nanoseconds since 1970, so that the traces of several processes line up.
class Trace {
 public:
  static constexpr size_t kSpansMax = 2'000'000;

  // `track` is the row that the span is drawn in. Spans of a track nest, or follow each other.
  void Add(const std::string& track, const std::string& name, int64_t begin, int64_t end);
  // Adds work that was queued at `begin` and runs in order: its span starts when the track's
  // earlier spans have ended.
  void AddQueued(const std::string& track, const std::string& name, int64_t begin, int64_t end);
  // The events as a JSON array, for process number `process`, which viewers call `title`.
  std::string ToJson(int process, const std::string& title) const;
  // How many spans beyond kSpansMax were not kept.
  int64_t dropped() const;

 private:
  struct Span {
    std::string track;
    std::string name;
    int64_t begin = 0;
    int64_t end = 0;
    bool queued = false;
  };
  void Keep(Span span);

  mutable Mutex mutex_;
  std::vector<Span> spans_ ABSL_GUARDED_BY(mutex_);
  int64_t dropped_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_TRACE_H_
