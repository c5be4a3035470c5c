// Records traces of the steps that `muster profile` asks for.
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

// The profiler of one rank. Whenever a step begins it looks for a request of the daemon
// (kProfileRequestFile of worker/run_directory/run_directory.h); it leaves the trace, or why there
// is none, in the files that are named there. Each request is served once; a newer one replaces one
// whose steps have not begun. Single-threaded.
class Profiler {
 public:
  // With an empty run directory there are no requests. `title` names the rank in the trace.
  Profiler(FileSystem& files, std::string run_directory, int rank, std::string title,
           std::shared_ptr<parallel::FlightRecorder> collectives);

  // The kind of device that runs the steps. Called before the first one.
  void SetDevice(kernels::DeviceKind kind) { device_ = kind; }
  // Returns where the spans of this step are recorded; null: nowhere.
  kernels::Trace* BeginStep(int64_t step);
  // The device has run the step in `seconds`.
  void EndStep(int64_t step, double seconds);

 private:
  void LookForRequest(int64_t step);
  void AddStep(int64_t step, double seconds);
  void Finish();
  void WriteInRunDirectory(const std::string& file, const std::string& text);

  FileSystem& files_;
  const std::string run_directory_;
  const int rank_;
  const std::string title_;
  const std::shared_ptr<parallel::FlightRecorder> collectives_;
  kernels::DeviceKind device_ = kernels::DeviceKind::kCpu;

  v1::ProfileSteps asked_;                 // the newest request
  bool waiting_ = false;                   // its first step has not begun
  std::shared_ptr<kernels::Trace> trace_;  // not null while its steps run
  int64_t step_ended_ = 0;                 // when the last recorded step ended, as Trace counts
  std::unique_ptr<kernels::DeviceTrace> device_trace_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_PROFILER_H_
