// How much of each GPU's memory is in use, by whomever.
#ifndef MUSTER_WORKER_DAEMON_GPU_MEMORY_H_
#define MUSTER_WORKER_DAEMON_GPU_MEMORY_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "muster/v1/job.pb.h"
#include "worker/daemon/nvml.h"

namespace muster::worker {

// Makes no CUDA context. Thread-safe.
class GpuMemory {
 public:
  // Null where there is no driver, or it answers for none of the devices, which are told by UUID.
  static std::unique_ptr<GpuMemory> Open(const std::string& library,
                                         const std::vector<v1::Device>& devices);
  ~GpuMemory();
  GpuMemory(const GpuMemory&) = delete;
  GpuMemory& operator=(const GpuMemory&) = delete;

  // Of the device of this name ("cuda:0"); no value when it is not one of these, or does not
  // answer.
  std::optional<int64_t> UsedBytes(const std::string& device) const;

 private:
  explicit GpuMemory(const Nvml& nvml) : nvml_(nvml) {}

  const Nvml nvml_;
  std::map<std::string, NvmlDevice> handles_;  // by name
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_GPU_MEMORY_H_
