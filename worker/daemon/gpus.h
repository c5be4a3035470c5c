// The GPUs of this machine, as NVIDIA's management library (NVML) reports them. The library is
// loaded on demand; the daemon never makes a CUDA context, which would take device memory.
#ifndef MUSTER_WORKER_DAEMON_GPUS_H_
#define MUSTER_WORKER_DAEMON_GPUS_H_

#include <optional>
#include <string>
#include <vector>

#include "muster/v1/job.pb.h"

namespace muster::worker {

struct GpuOptions {
  std::string library = "libnvidia-ml.so.1";
  // CUDA_VISIBLE_DEVICES of the environment, which ranks inherit: ordinals or UUIDs, in the order
  // in which CUDA numbers them. No value: all, in the order of their PCI addresses.
  std::optional<std::string> visible;
  // The ordinals of those that are offered; no value: all.
  std::optional<std::vector<int>> offered;
  std::string sysfs = "/sys";
  // What rank processes need: the major version of their CUDA runtime (0 = they have no CUDA) and
  // the architectures that they have code for, as CMake names them ("90a-real,80-real").
  int cuda_major = 0;
  std::string architectures;

  // The options of this process's environment and this build.
  static GpuOptions FromEnvironment();
};

struct GpuReport {
  // "cuda:0", ...: N is CUDA's ordinal in a rank process of this daemon. A device that ranks cannot
  // use is listed with the reason in `unusable`.
  std::vector<v1::Device> devices;
  // Each names the device's UUID, what is wrong and what to do.
  std::vector<std::string> warnings;
  std::string driver;  // "580.159.04"; empty without one
};

// Never fails: a machine without NVIDIA's driver has no GPUs, one whose driver does not answer has
// none and a warning.
GpuReport DiscoverGpus(const GpuOptions& options);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_GPUS_H_
