#include "worker/daemon/gpu_sampler.h"

#include <utility>

namespace muster::worker {
namespace {

using metrics::Family;
using metrics::Kind;

const std::vector<absl::string_view>& ByGpu() {
  static const auto& labels = *new std::vector<absl::string_view>{"gpu"};
  return labels;
}

struct Families {
  Family info{Kind::kGauge,
              "muster_worker_gpu_info",
              "1, with the GPU's UUID, its name on this worker and its model.",
              {"gpu", "device", "model"}};
  Family up{Kind::kGauge, "muster_worker_gpu_up", "1 while the GPU answers, 0 once it is lost.",
            ByGpu()};
  Family power{Kind::kGauge, "muster_worker_gpu_power_watts", "Power that the GPU draws.", ByGpu()};
  Family power_limit{Kind::kGauge, "muster_worker_gpu_power_limit_watts",
                     "Power at which the GPU lowers its clocks.", ByGpu()};
  Family energy{Kind::kCounter, "muster_worker_gpu_energy_joules_total",
                "Energy that the GPU has taken since this daemon started.", ByGpu()};
  Family temperature{Kind::kGauge, "muster_worker_gpu_temperature_celsius",
                     "Temperature of the GPU.", ByGpu()};
  Family sm_clock{Kind::kGauge, "muster_worker_gpu_sm_clock_hertz",
                  "Clock of the GPU's multiprocessors.", ByGpu()};
  Family memory_clock{Kind::kGauge, "muster_worker_gpu_memory_clock_hertz",
                      "Clock of the GPU's memory.", ByGpu()};
  Family memory_used{Kind::kGauge, "muster_worker_gpu_memory_used_bytes",
                     "Memory of the GPU in use, by every process.", ByGpu()};
  Family memory{Kind::kGauge, "muster_worker_gpu_memory_bytes", "Memory of the GPU.", ByGpu()};
  Family busy{Kind::kGauge, "muster_worker_gpu_busy_ratio",
              "Share of the last sample period in which some kernel ran, 0 to 1. It says nothing "
              "about how much of the GPU the kernel used.",
              ByGpu()};
  Family throttled{Kind::kCounter,
                   "muster_worker_gpu_throttled_seconds_total",
                   "Time in which the GPU's clocks were lowered, sampled every five seconds, by "
                   "reason: power_cap, hardware_slowdown, software_thermal, hardware_thermal, "
                   "power_brake.",
                   {"gpu", "reason"}};
  Family ecc{Kind::kGauge,
             "muster_worker_gpu_ecc_errors",
             "Memory errors since the driver was loaded, corrected and uncorrected.",
             {"gpu", "kind"}};
  Family remapped{Kind::kGauge,
                  "muster_worker_gpu_remapped_rows",
                  "Rows of memory that were replaced (corrected, uncorrected), wait for a reset "
                  "(pending), or could not be replaced (failed).",
                  {"gpu", "kind"}};
};

const Families& All() {
  static const Families& families = *new Families();
  return families;
}

struct Reason {
  unsigned long long bit;
  const char* name;
};
constexpr Reason kReasons[] = {{0x04, "power_cap"},
                               {0x08, "hardware_slowdown"},
                               {0x20, "software_thermal"},
                               {0x40, "hardware_thermal"},
                               {0x80, "power_brake"}};

// Whether the library has `function` and it succeeds with these arguments.
template <typename Function, typename... Arguments>
bool Ask(Function function, Arguments... arguments) {
  return function != nullptr && function(arguments...) == kNvmlSuccess;
}

}  // namespace

std::vector<const Family*> GpuFamilies() {
  const Families& f = All();
  return {&f.info,        &f.up,        &f.power,        &f.power_limit, &f.energy,
          &f.temperature, &f.sm_clock,  &f.memory_clock, &f.memory_used, &f.memory,
          &f.busy,        &f.throttled, &f.ecc,          &f.remapped};
}

std::unique_ptr<GpuSampler> GpuSampler::Start(const std::string& library, const Clock& clock,
                                              metrics::Registry& metrics) {
  const absl::StatusOr<Nvml> nvml = Nvml::Load(library);
  if (!nvml.ok() || nvml->Init() != kNvmlSuccess) return nullptr;
  std::unique_ptr<GpuSampler> sampler(new GpuSampler(*nvml, clock, metrics));
  sampler->Find();
  if (sampler->gpus_.empty()) return nullptr;
  sampler->loop_ = std::make_unique<ThreadLoop>(clock);
  sampler->loop_->Post([self = sampler.get()] { self->SampleAll(self->clock_.Monotonic()); });
  return sampler;
}

GpuSampler::GpuSampler(Nvml nvml, const Clock& clock, metrics::Registry& metrics)
    : nvml_(nvml), clock_(clock), metrics_(metrics) {}

GpuSampler::~GpuSampler() {
  if (loop_ != nullptr) loop_->Stop();
  nvml_.Shutdown();
}

void GpuSampler::Find() {
  unsigned int count = 0;
  if (nvml_.DeviceGetCount(&count) != kNvmlSuccess) return;
  for (unsigned int index = 0; index < count; ++index) {
    NvmlDevice device = nullptr;
    char uuid[96] = {};
    char model[96] = {};
    // DiscoverGpus has warned of a device that does not answer.
    if (nvml_.DeviceGetHandleByIndex(index, &device) != kNvmlSuccess ||
        nvml_.DeviceGetUUID(device, uuid, sizeof(uuid)) != kNvmlSuccess ||
        nvml_.DeviceGetName(device, model, sizeof(model)) != kNvmlSuccess) {
      continue;
    }
    gpus_.push_back({device, uuid});
    metrics_.GetGauge(All().info, {uuid, "cuda:" + std::to_string(index), model}).Set(1);
  }
}

void GpuSampler::SampleAll(absl::Duration before) {
  const absl::Duration now = clock_.Monotonic();
  for (Gpu& gpu : gpus_) Sample(gpu, now - before);
  loop_->PostAfter(kInterval, [this, now] { SampleAll(now); });
}

void GpuSampler::Set(const Family& family, const Gpu& gpu, double value) {
  metrics_.GetGauge(family, {gpu.uuid}).Set(value);
}

void GpuSampler::Sample(Gpu& gpu, absl::Duration since) {
  const NvmlDevice device = gpu.device;
  NvmlMemory memory = {};
  const int answered = nvml_.DeviceGetMemoryInfo(device, &memory);
  Set(All().up, gpu, answered == kNvmlErrorGpuIsLost ? 0 : 1);
  if (answered == kNvmlErrorGpuIsLost) return;
  if (answered == kNvmlSuccess) {
    Set(All().memory_used, gpu, static_cast<double>(memory.used));
    Set(All().memory, gpu, static_cast<double>(memory.total));
  }
  unsigned int value = 0;
  if (Ask(nvml_.DeviceGetPowerUsage, device, &value)) Set(All().power, gpu, value * 1e-3);
  if (Ask(nvml_.DeviceGetEnforcedPowerLimit, device, &value)) {
    Set(All().power_limit, gpu, value * 1e-3);
  }
  if (Ask(nvml_.DeviceGetTemperature, device, kNvmlSensorGpu, &value)) {
    Set(All().temperature, gpu, value);
  }
  if (Ask(nvml_.DeviceGetClockInfo, device, kNvmlClockSm, &value)) {
    Set(All().sm_clock, gpu, value * 1e6);
  }
  if (Ask(nvml_.DeviceGetClockInfo, device, kNvmlClockMemory, &value)) {
    Set(All().memory_clock, gpu, value * 1e6);
  }
  NvmlUtilization load = {};
  if (Ask(nvml_.DeviceGetUtilizationRates, device, &load)) Set(All().busy, gpu, load.gpu * 1e-2);
  unsigned long long number = 0;
  if (Ask(nvml_.DeviceGetTotalEnergyConsumption, device, &number)) {
    metrics::Counter& energy = metrics_.GetCounter(All().energy, {gpu.uuid});
    // The library counts from the load of the driver, so a smaller number is of a new driver.
    if (gpu.energy_known && number > gpu.energy_millijoules) {
      energy.Increment(static_cast<double>(number - gpu.energy_millijoules) * 1e-3);
    }
    gpu.energy_millijoules = number;
    gpu.energy_known = true;
  }
  if (Ask(nvml_.DeviceGetCurrentClocksThrottleReasons, device, &number)) {
    for (const Reason& reason : kReasons) {
      const double seconds = (number & reason.bit) != 0 ? absl::ToDoubleSeconds(since) : 0;
      metrics_.GetCounter(All().throttled, {gpu.uuid, reason.name}).Increment(seconds);
    }
  }
  for (const auto& [kind, name] :
       {std::pair(kNvmlCorrectedEcc, "corrected"), std::pair(kNvmlUncorrectedEcc, "uncorrected")}) {
    if (Ask(nvml_.DeviceGetTotalEccErrors, device, kind, kNvmlVolatileEcc, &number)) {
      metrics_.GetGauge(All().ecc, {gpu.uuid, name}).Set(static_cast<double>(number));
    }
  }
  unsigned int corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (Ask(nvml_.DeviceGetRemappedRows, device, &corrected, &uncorrected, &pending, &failed)) {
    for (const auto& [name, rows] :
         {std::pair("corrected", corrected), std::pair("uncorrected", uncorrected),
          std::pair("pending", pending), std::pair("failed", failed)}) {
      metrics_.GetGauge(All().remapped, {gpu.uuid, name}).Set(rows);
    }
  }
}

}  // namespace muster::worker
