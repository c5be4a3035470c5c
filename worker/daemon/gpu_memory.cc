#include "worker/daemon/gpu_memory.h"

#include "absl/status/statusor.h"

namespace muster::worker {

std::unique_ptr<GpuMemory> GpuMemory::Open(const std::string& library,
                                           const std::vector<v1::Device>& devices) {
  const absl::StatusOr<Nvml> nvml = Nvml::Load(library);
  if (!nvml.ok() || nvml->Init() != kNvmlSuccess) return nullptr;
  std::unique_ptr<GpuMemory> memory(new GpuMemory(*nvml));
  unsigned int count = 0;
  if (nvml->DeviceGetCount(&count) != kNvmlSuccess) count = 0;
  for (unsigned int index = 0; index < count; ++index) {
    NvmlDevice handle = nullptr;
    char uuid[96] = {};
    if (nvml->DeviceGetHandleByIndex(index, &handle) != kNvmlSuccess ||
        nvml->DeviceGetUUID(handle, uuid, sizeof(uuid)) != kNvmlSuccess) {
      continue;
    }
    for (const v1::Device& device : devices) {
      if (device.uuid() == uuid) memory->handles_[device.name()] = handle;
    }
  }
  if (memory->handles_.empty()) return nullptr;
  return memory;
}

GpuMemory::~GpuMemory() { nvml_.Shutdown(); }

std::optional<int64_t> GpuMemory::UsedBytes(const std::string& device) const {
  const auto handle = handles_.find(device);
  NvmlMemory memory = {};
  if (handle == handles_.end() ||
      nvml_.DeviceGetMemoryInfo(handle->second, &memory) != kNvmlSuccess) {
    return std::nullopt;
  }
  return static_cast<int64_t>(memory.used);
}

}  // namespace muster::worker
