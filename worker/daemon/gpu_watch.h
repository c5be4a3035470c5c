// Errors that NVIDIA's driver reports of this machine's GPUs while ranks run on them: Xids
// (https://docs.nvidia.com/deploy/xid-errors), as they happen.
#ifndef MUSTER_WORKER_DAEMON_GPU_WATCH_H_
#define MUSTER_WORKER_DAEMON_GPU_WATCH_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "worker/daemon/nvml.h"

namespace muster::worker {

struct GpuError {
  std::string uuid;
  uint64_t xid = 0;
  // "Xid 79 on GPU-...: it has fallen off the bus; reboot the machine"
  std::string message;
  bool lost = false;  // nothing can run on it until it is reset or the machine is rebooted
};

// What an Xid means and what to do about it; for an unknown one, where it is documented.
std::string ExplainXid(uint64_t xid);

// Those that ExplainXid explains.
std::vector<uint64_t> KnownXids();

// Whether a GPU cannot be used after this Xid until it is reset.
bool LosesGpu(uint64_t xid);

// Owns a thread that waits for errors. Makes no CUDA context.
class GpuWatch {
 public:
  // Calls `on_error` on the thread, in order, until the destructor, which takes up to a quarter of
  // a second. Null where there is no driver, no GPU, or a library without events.
  static std::unique_ptr<GpuWatch> Start(const std::string& library,
                                         std::function<void(GpuError)> on_error);
  ~GpuWatch();

 private:
  GpuWatch(Nvml nvml, std::function<void(GpuError)> on_error)
      : nvml_(nvml), on_error_(std::move(on_error)) {}
  bool Register();
  void Run();
  // Reports the devices that are lost and keeps the others registered; false if none are left.
  bool DropLost();

  const Nvml nvml_;
  const std::function<void(GpuError)> on_error_;
  NvmlEventSet set_ = nullptr;
  std::map<NvmlDevice, std::string> uuids_;
  std::set<std::string> lost_;  // UUIDs of the devices that have been reported as lost
  std::atomic<bool> stopping_ = false;
  std::thread thread_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_GPU_WATCH_H_
