#ifndef MUSTER_KERNELS_DEVICE_RANGE_H_
#define MUSTER_KERNELS_DEVICE_RANGE_H_

#include <cstdint>
#include <string>

#include "kernels/device/device.h"
#include "kernels/device/trace.h"

namespace muster::kernels {

// A named stretch of what the calling thread enqueues. On CUDA an NVTX range: Nsight Systems shows
// it above the kernels that it has launched. With a trace, also a span of it: on an eager
// host stream when the work ran, on CUDA when it was enqueued.
// Without a profiler or a trace it costs a call or two, on other devices nothing. Ranges nest; they
// end on the thread that began them.
class Range {
 public:
  Range(Stream& stream, const std::string& name, Trace* trace = nullptr);
  ~Range();
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;

 private:
  const bool shown_;
  Trace* const trace_;
  const char* track_ = "";
  std::string name_;  // with a trace
  int64_t begin_ = 0;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_RANGE_H_
