// What a CUDA device runs, as spans of a trace: kernels, copies and fills, a track per stream, from
// the activity records of CUPTI, NVIDIA's profiling interface. Its library is loaded when it is
// needed.
#ifndef MUSTER_KERNELS_DEVICE_DEVICE_TRACE_H_
#define MUSTER_KERNELS_DEVICE_DEVICE_TRACE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/trace.h"

namespace muster::kernels {

// Records from Start() to its end. One at a time in a process, which must have made its CUDA
// device.
class DeviceTrace {
 public:
  // kFailedPrecondition: CUPTI is not there, refuses (another profiler has the device, or its
  // counters are for administrators alone), or is busy; says what to do. kUnimplemented in a build
  // without.
  static absl::StatusOr<std::unique_ptr<DeviceTrace>> Start(std::shared_ptr<Trace> trace);
  // What the device has finished by now is in the trace.
  virtual ~DeviceTrace() = default;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_DEVICE_TRACE_H_
