// Records what a CUDA device runs (kernels, copies and fills, a track per stream) as spans of a
// trace, from the activity records of CUPTI, NVIDIA's profiling interface. Its library is loaded
// when a recording starts.
#ifndef MUSTER_KERNELS_DEVICE_DEVICE_TRACE_H_
#define MUSTER_KERNELS_DEVICE_DEVICE_TRACE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "kernels/device/trace.h"

namespace muster::kernels {

// Records from Start() until it is destroyed. A process has at most one at a time, and makes its
// CUDA device before.
class DeviceTrace {
 public:
  // kFailedPrecondition, with what to do: CUPTI is not installed, it refuses (another profiler has
  // the device, or the driver allows profiling to administrators alone), or this process records
  // already. kUnimplemented in a build without CUPTI.
  static absl::StatusOr<std::unique_ptr<DeviceTrace>> Start(std::shared_ptr<Trace> trace);
  // Adds what the device has finished by now to the trace.
  virtual ~DeviceTrace() = default;
};

}  // namespace muster::kernels

#endif  // MUSTER_KERNELS_DEVICE_DEVICE_TRACE_H_
