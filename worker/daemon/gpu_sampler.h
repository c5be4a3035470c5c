// Power, temperature, clocks, memory, load and error counts of this machine's GPUs, as NVIDIA's
// management library tells them, for the daemon's metrics.
#ifndef MUSTER_WORKER_DAEMON_GPU_SAMPLER_H_
#define MUSTER_WORKER_DAEMON_GPU_SAMPLER_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/loop.h"
#include "base/metrics.h"
#include "worker/daemon/nvml.h"

namespace muster::worker {

// The families that a sampler feeds. Each has the label gpu, a UUID.
std::vector<const metrics::Family*> GpuFamilies();

// Samples on a thread of its own, since a sick GPU may let a call of the library wait for seconds.
// What a library or a GPU does not tell has no series; a GPU that is lost keeps its last values and
// has muster_worker_gpu_up 0.
class GpuSampler {
 public:
  static constexpr absl::Duration kInterval = absl::Seconds(5);

  // Null where there is no driver or no GPU. `clock` and `metrics` outlive the sampler.
  static std::unique_ptr<GpuSampler> Start(const std::string& library, const Clock& clock,
                                           metrics::Registry& metrics);
  ~GpuSampler();

 private:
  struct Gpu {
    NvmlDevice device;
    std::string uuid;
    unsigned long long energy_millijoules = 0;  // as last counted
    bool energy_known = false;
  };

  GpuSampler(Nvml nvml, const Clock& clock, metrics::Registry& metrics);
  void Find();
  void SampleAll(absl::Duration before);
  void Sample(Gpu& gpu, absl::Duration since);
  void Set(const metrics::Family& family, const Gpu& gpu, double value);

  const Nvml nvml_;
  const Clock& clock_;
  metrics::Registry& metrics_;
  std::vector<Gpu> gpus_;  // used on the loop, once it runs
  std::unique_ptr<ThreadLoop> loop_;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_GPU_SAMPLER_H_
