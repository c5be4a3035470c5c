#include "worker/daemon/gpu_watch.h"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster::worker {
namespace {

constexpr unsigned int kWaitMilliseconds = 250;
constexpr uint64_t kXidOffTheBus = 79;

}  // namespace

std::string ExplainXid(uint64_t xid) {
  switch (xid) {
    case 13:
    case 31:
      return "a kernel touched memory that is not its own; an error of the program that ran on it";
    case 43:
      return "a program's work was stopped after an error of its own; the GPU is well";
    case 45:
      return "a program's work was removed, after another error or because the program ended";
    case 48:
      return "memory (ECC) error that could not be corrected; reset it when it is idle";
    case 63:
    case 64:
      return "a row of its memory is damaged and waits to be replaced; reset it when it is idle";
    case 74:
      return "NVLink error; check its links with nvidia-smi nvlink, then reset or replace it";
    case 79:
      return "it has fallen off the bus; reboot the machine, and look at power and cooling";
    case 94:
      return "memory (ECC) error that hit one program alone; the program must start again";
    case 95:
      return "memory (ECC) error that may have hit every program on it; reset it";
    case 119:
    case 120:
      return "its system processor (GSP) does not answer; reset it, or reboot the machine";
    default:
      return "look it up in NVIDIA's list of Xid errors, and in the kernel's log";
  }
}

std::vector<uint64_t> KnownXids() { return {13, 31, 43, 45, 48, 63, 64, 74, 79, 94, 95, 119, 120}; }

bool LosesGpu(uint64_t xid) {
  constexpr uint64_t kLosing[] = {48, 64, 79, 95, 119, 120};
  return std::find(std::begin(kLosing), std::end(kLosing), xid) != std::end(kLosing);
}

std::unique_ptr<GpuWatch> GpuWatch::Start(const std::string& library,
                                          std::function<void(GpuError)> on_error) {
  const absl::StatusOr<Nvml> nvml = Nvml::Load(library);
  if (!nvml.ok() || nvml->EventSetCreate == nullptr || nvml->Init() != kNvmlSuccess) return nullptr;
  std::unique_ptr<GpuWatch> watch(new GpuWatch(*nvml, std::move(on_error)));
  if (!watch->Register()) return nullptr;
  watch->thread_ = std::thread([self = watch.get()] { self->Run(); });
  return watch;
}

GpuWatch::~GpuWatch() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
  if (set_ != nullptr) nvml_.EventSetFree(set_);
  nvml_.Shutdown();
}

bool GpuWatch::Register() {
  unsigned int count = 0;
  uuids_.clear();
  if (nvml_.EventSetCreate(&set_) != kNvmlSuccess) {
    set_ = nullptr;
    return false;
  }
  if (nvml_.DeviceGetCount(&count) != kNvmlSuccess) return false;
  for (unsigned int index = 0; index < count; ++index) {
    NvmlDevice device = nullptr;
    char uuid[96] = {};
    // DiscoverGpus has warned of a device that does not answer.
    if (nvml_.DeviceGetHandleByIndex(index, &device) != kNvmlSuccess ||
        nvml_.DeviceGetUUID(device, uuid, sizeof(uuid)) != kNvmlSuccess ||
        nvml_.DeviceRegisterEvents(device, kNvmlEventXid, set_) != kNvmlSuccess) {
      continue;
    }
    uuids_[device] = uuid;
  }
  return !uuids_.empty();
}

bool GpuWatch::DropLost() {
  bool dropped = false;
  for (const auto& [device, uuid] : uuids_) {
    NvmlMemory memory = {};
    if (nvml_.DeviceGetMemoryInfo(device, &memory) != kNvmlErrorGpuIsLost) continue;
    dropped = true;
    // The driver may have lost the device without reporting an Xid.
    if (!lost_.insert(uuid).second) continue;
    on_error_({uuid, kXidOffTheBus,
               absl::StrCat(uuid, ": ", nvml_.Explain(kNvmlErrorGpuIsLost), "; ",
                            ExplainXid(kXidOffTheBus)),
               /*lost=*/true});
  }
  if (!dropped) return true;
  // A lost device in the set makes every wait return at once, and hides the others' events.
  nvml_.EventSetFree(set_);
  return Register();
}

void GpuWatch::Run() {
  while (!stopping_) {
    NvmlEvent event = {};
    const int code = nvml_.EventSetWait(set_, &event, kWaitMilliseconds);
    if (code == kNvmlErrorTimeout) continue;
    if (code != kNvmlSuccess) {
      std::this_thread::sleep_for(std::chrono::milliseconds(kWaitMilliseconds));
      if (code == kNvmlErrorGpuIsLost && !DropLost()) return;
      continue;
    }
    const auto found = uuids_.find(event.device);
    if (event.type != kNvmlEventXid || found == uuids_.end()) continue;
    if (LosesGpu(event.data)) lost_.insert(found->second);
    on_error_(
        {found->second, event.data,
         absl::StrCat("Xid ", event.data, " on ", found->second, ": ", ExplainXid(event.data)),
         LosesGpu(event.data)});
  }
}

}  // namespace muster::worker
