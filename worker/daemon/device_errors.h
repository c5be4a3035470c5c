// The errors that the driver has reported of each offered GPU since a rank was started on it, and
// what they add to the message of how that rank ended.
#ifndef MUSTER_WORKER_DAEMON_DEVICE_ERRORS_H_
#define MUSTER_WORKER_DAEMON_DEVICE_ERRORS_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "muster/v1/job.pb.h"
#include "muster/v1/session.pb.h"
#include "worker/daemon/gpu_watch.h"

namespace muster::worker {

// Devices are named as in v1::Device ("cuda:0"). Thread: one.
class DeviceErrors {
 public:
  explicit DeviceErrors(std::string worker) : worker_(std::move(worker)) {}

  // Before any of the calls below.
  void AddGpu(const v1::Device& device) { names_[device.uuid()] = device.name(); }
  bool has_gpus() const { return !names_.empty(); }

  // Returns the device that the error is of; no value: it is not offered. A fault that reports
  // itself many times is kept once, and of each device the first four are kept.
  std::optional<std::string> Add(const GpuError& error);
  // A rank starts on the device: what came before is not of it.
  void Clear(const std::string& device) { errors_.erase(device); }
  // Adds the device's errors to the message of a rank that ended on it, and forgets them; to that
  // of one that failed also which GPU it was.
  void Explain(const std::string& device, v1::RankExit& exit);

 private:
  const std::string worker_;                                // for messages
  std::map<std::string, std::string> names_;                // by UUID
  std::map<std::string, std::vector<std::string>> errors_;  // by device
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_DEVICE_ERRORS_H_
