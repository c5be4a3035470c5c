#ifndef MUSTER_KERNELS_DEVICE_RANGE_H_
#define MUSTER_KERNELS_DEVICE_RANGE_H_

#include <cstdint>
#include <string>

#include "kernels/device/device.h"
#include "kernels/device/trace.h"

namespace muster::kernels {

// Names what the calling thread enqueues while the object lives. On CUDA it is an NVTX range, which
// Nsight Systems shows above the kernels launched in it. With a trace it is also a span of the
// trace: on an eager host stream the time in which the work ran, on CUDA the time in which it was
// enqueued. Without a profiler or a trace it costs a call or two on CUDA, and nothing elsewhere.
// Ranges nest; they end on the thread that began them.
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
