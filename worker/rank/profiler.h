// Records the steps that `muster profile` asks for.
#ifndef MUSTER_WORKER_RANK_PROFILER_H_
#define MUSTER_WORKER_RANK_PROFILER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "base/file_system.h"
#include "kernels/device/device.h"
#include "kernels/device/device_trace.h"
#include "kernels/device/trace.h"
#include "muster/v1/job.pb.h"
#include "parallel/comm/flight_recorder.h"

namespace muster::worker {

// Of one rank. Looks for RUN_DIR/profile.pb (ProfileSteps), which the daemon writes, whenever a
// step begins; leaves the trace in RUN_DIR/profile-<first step>-<steps>.json, or why there is none
// in RUN_DIR/profile-<first step>-<steps>.failed. Each request is served once; a newer one replaces
// one whose steps have not begun. Single-threaded.
class Profiler {
 public:
  // An empty run directory: never asked. `title` names the rank in the trace.
  Profiler(FileSystem& files, std::string run_directory, int rank, std::string title,
           std::shared_ptr<parallel::FlightRecorder> collectives);

  // The device of the steps; before the first one.
  void SetDevice(kernels::DeviceKind kind) { device_ = kind; }
  // Where the spans of this step go; null: nowhere.
  kernels::Trace* BeginStep(int64_t step);
  // The step has been run by the device, which took it so long.
  void EndStep(int64_t step, double seconds);

 private:
  void LookForRequest(int64_t step);
  void AddStep(int64_t step, double seconds);
  void Finish();
  void Leave(const std::string& file, const std::string& text);

  FileSystem& files_;
  const std::string run_directory_;
  const int rank_;
  const std::string title_;
  const std::shared_ptr<parallel::FlightRecorder> collectives_;
  kernels::DeviceKind device_ = kernels::DeviceKind::kCpu;

  v1::ProfileSteps asked_;                 // the newest request
  bool waiting_ = false;                   // for its first step
  std::shared_ptr<kernels::Trace> trace_;  // while its steps run
  int64_t step_ended_ = 0;                 // of the trace, in its time
  std::unique_ptr<kernels::DeviceTrace> device_trace_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_PROFILER_H_
