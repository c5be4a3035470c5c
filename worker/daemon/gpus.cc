#include "worker/daemon/gpus.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "worker/daemon/nvml.h"

namespace muster::worker {
namespace {

struct Gpu {
  NvmlDevice handle = nullptr;
  int index = 0;  // NVML's: in the order of PCI addresses
  v1::Device device;
};

// Whether code for `architectures` runs on a device of this compute capability: "90a" on 9.0 alone,
// "80-real" on 8.x, "80" and "80-virtual" on everything newer too.
bool Runs(const std::string& architectures, int major, int minor) {
  for (absl::string_view name : absl::StrSplit(architectures, ',', absl::SkipEmpty())) {
    const bool real = absl::EndsWith(name, "-real");
    name = name.substr(0, name.find('-'));
    const bool exact = absl::EndsWith(name, "a");
    int number = 0;
    if (!absl::SimpleAtoi(exact ? name.substr(0, name.size() - 1) : name, &number)) continue;
    const int device = major * 10 + minor;
    if (exact ? device == number : device >= number && (!real || device / 10 == number / 10)) {
      return true;
    }
  }
  return false;
}

// The device's folder in sysfs.
std::string PciFolder(const std::string& sysfs, const std::string& bus_id) {
  // NVML's domain has eight digits, the kernel's four.
  std::string address = absl::AsciiStrToLower(bus_id);
  if (address.size() > 12) address = address.substr(address.size() - 12);
  return absl::StrCat(sysfs, "/bus/pci/devices/", address);
}

int NumaNode(const std::string& sysfs, const std::string& bus_id) {
  std::ifstream file(PciFolder(sysfs, bus_id) + "/numa_node");
  int node = -1;
  return file >> node ? node : -1;
}

// The root port above the device, when there is a switch between them; else empty. The folder is a
// link to a path of bridges: devices/pci0000:17/0000:17:01.0/0000:18:00.0/0000:19:00.0/0000:1a:00.0
// is a device behind the two ends of a switch (18, 19) below the root port 17:01.0.
std::string RootPort(const std::string& sysfs, const std::string& bus_id) {
  std::error_code error;
  const std::filesystem::path folder = std::filesystem::canonical(PciFolder(sysfs, bus_id), error);
  if (error) return "";
  std::vector<std::string> bridges;
  bool below_root = false;
  for (const std::filesystem::path& part : folder) {
    if (below_root) bridges.push_back(part.string());
    if (absl::StartsWith(part.string(), "pci") && absl::StrContains(part.string(), ':')) {
      below_root = true;
    }
  }
  return bridges.size() >= 4 ? bridges.front() : "";
}

// Why ranks cannot use the device; empty when they can.
std::string WhyUnusable(const Nvml& nvml, const GpuOptions& options, const Gpu& gpu,
                        int driver_cuda) {
  if (options.cuda_major == 0) {
    return "the rank program of this worker is built without CUDA; install a package made by "
           "./dev package --cuda";
  }
  if (driver_cuda / 1000 < options.cuda_major) {
    return absl::StrFormat("its driver supports CUDA %d.%d, this build needs %d; update the driver",
                           driver_cuda / 1000, driver_cuda % 1000 / 10, options.cuda_major);
  }
  int major = 0, minor = 0;
  if (nvml.DeviceGetCudaComputeCapability(gpu.handle, &major, &minor) == kNvmlSuccess &&
      !Runs(options.architectures, major, minor)) {
    return absl::StrFormat(
        "compute capability %d.%d, but this build has code for %s; rebuild with "
        "-DMUSTER_CUDA_ARCHITECTURES=%d%d",
        major, minor, options.architectures, major, minor);
  }
  unsigned int corrected = 0, uncorrected = 0, pending = 0, failed = 0;
  if (nvml.DeviceGetRemappedRows != nullptr &&
      nvml.DeviceGetRemappedRows(gpu.handle, &corrected, &uncorrected, &pending, &failed) ==
          kNvmlSuccess) {
    if (failed != 0) return "a row of its memory is damaged and could not be replaced; replace it";
    if (pending != 0) {
      return "a row of its memory is damaged and waits to be replaced; reset the device";
    }
  }
  return "";
}

void CountEccErrors(const Nvml& nvml, const Gpu& gpu, GpuReport& report) {
  unsigned long long errors = 0;
  if (nvml.DeviceGetTotalEccErrors == nullptr ||
      nvml.DeviceGetTotalEccErrors(gpu.handle, kNvmlUncorrectedEcc, kNvmlVolatileEcc, &errors) !=
          kNvmlSuccess ||
      errors == 0) {
    return;
  }
  report.warnings.push_back(absl::StrCat(gpu.device.uuid(), ": ", errors,
                                         " uncorrected memory (ECC) errors since its driver was "
                                         "loaded; reset it when it is idle"));
}

// Fills in all but its name and links; false, with a warning, when it does not answer.
bool Describe(const Nvml& nvml, const GpuOptions& options, int driver_cuda, Gpu& gpu,
              GpuReport& report) {
  char text[96] = {};
  NvmlMemory memory = {};
  NvmlPciInfo pci = {};
  const int codes[] = {nvml.DeviceGetUUID(gpu.handle, text, sizeof(text)),
                       nvml.DeviceGetMemoryInfo(gpu.handle, &memory),
                       nvml.DeviceGetPciInfo(gpu.handle, &pci)};
  for (const int code : codes) {
    if (code == kNvmlSuccess) continue;
    report.warnings.push_back(absl::StrCat(
        "GPU ", gpu.index, text[0] == 0 ? "" : absl::StrCat(" ", text), ": ", nvml.Explain(code),
        code == kNvmlErrorGpuIsLost ? "; it has fallen off the bus: reboot the machine"
                                    : "; see nvidia-smi"));
    return false;
  }
  v1::Device& device = gpu.device;
  device.set_kind(v1::DEVICE_KIND_CUDA);
  device.set_uuid(text);
  device.set_memory_bytes(static_cast<int64_t>(memory.total));
  device.set_pci_address(absl::AsciiStrToLower(pci.bus_id));
  device.set_numa_node(NumaNode(options.sysfs, pci.bus_id));
  device.set_pcie_switch(RootPort(options.sysfs, pci.bus_id));
  char model[96] = {};
  if (nvml.DeviceGetName(gpu.handle, model, sizeof(model)) == kNvmlSuccess) {
    device.set_model(model);
  }
  device.set_unusable(WhyUnusable(nvml, options, gpu, driver_cuda));
  if (!device.unusable().empty()) {
    report.warnings.push_back(absl::StrCat(device.uuid(), ": ", device.unusable()));
  }
  CountEccErrors(nvml, gpu, report);
  return true;
}

// Whether CUDA_VISIBLE_DEVICES's `entry` means this device: its ordinal, or a prefix of its UUID.
bool Means(absl::string_view entry, const Gpu& gpu) {
  int index = 0;
  if (absl::SimpleAtoi(entry, &index)) return index == gpu.index;
  return absl::StartsWith(entry, "GPU-") && absl::StartsWith(gpu.device.uuid(), entry);
}

// The visible devices in CUDA's order. Like CUDA it stops at the first entry that names no device.
std::vector<Gpu> Visible(const std::vector<Gpu>& gpus, const std::optional<std::string>& visible) {
  if (!visible.has_value()) return gpus;
  std::vector<Gpu> chosen;
  for (absl::string_view entry : absl::StrSplit(*visible, ',')) {
    entry = absl::StripAsciiWhitespace(entry);
    const auto it = std::find_if(gpus.begin(), gpus.end(),
                                 [entry](const Gpu& gpu) { return Means(entry, gpu); });
    if (entry.empty() || it == gpus.end()) break;
    chosen.push_back(*it);
  }
  return chosen;
}

// Where sysfs tells no root ports, as in some containers, NVML tells which devices switches
// connect: these are named by the address of the first of them.
void NameSwitches(const Nvml& nvml, std::vector<Gpu>& gpus) {
  if (nvml.DeviceGetTopologyCommonAncestor == nullptr) return;
  for (size_t i = 0; i < gpus.size(); ++i) {
    for (size_t j = i + 1; j < gpus.size(); ++j) {
      if (!gpus[j].device.pcie_switch().empty()) continue;
      int ancestor = 0;
      if (nvml.DeviceGetTopologyCommonAncestor(gpus[i].handle, gpus[j].handle, &ancestor) !=
              kNvmlSuccess ||
          ancestor > kNvmlTopologyMultiple) {
        continue;
      }
      if (gpus[i].device.pcie_switch().empty()) {
        gpus[i].device.set_pcie_switch(gpus[i].device.pci_address());
      }
      gpus[j].device.set_pcie_switch(gpus[i].device.pcie_switch());
    }
  }
}

// NVLinks of `a` that lead to `b`: directly, or by way of switches, which connect every link of one
// device with every other device.
int LinksBetween(const Nvml& nvml, const Gpu& a, const Gpu& b) {
  if (nvml.DeviceGetNvLinkState == nullptr) return 0;
  int direct = 0, to_switches = 0;
  for (unsigned int link = 0; link < kNvmlLinksMax; ++link) {
    int active = 0;
    if (nvml.DeviceGetNvLinkState(a.handle, link, &active) != kNvmlSuccess || active == 0) continue;
    int remote = 0;
    if (nvml.DeviceGetNvLinkRemoteDeviceType != nullptr &&
        nvml.DeviceGetNvLinkRemoteDeviceType(a.handle, link, &remote) == kNvmlSuccess &&
        remote == kNvmlRemoteIsSwitch) {
      ++to_switches;
      continue;
    }
    NvmlPciInfo peer = {};
    if (nvml.DeviceGetNvLinkRemotePciInfo != nullptr &&
        nvml.DeviceGetNvLinkRemotePciInfo(a.handle, link, &peer) == kNvmlSuccess &&
        absl::AsciiStrToLower(peer.bus_id) == b.device.pci_address()) {
      ++direct;
    }
  }
  int p2p = kNvmlP2pOk;
  if (to_switches > 0 && nvml.DeviceGetP2PStatus != nullptr) {
    p2p = -1;
    nvml.DeviceGetP2PStatus(a.handle, b.handle, kNvmlP2pNvlink, &p2p);
  }
  return direct + (p2p == kNvmlP2pOk ? to_switches : 0);
}

void Discover(const Nvml& nvml, const GpuOptions& options, GpuReport& report) {
  char driver[96] = {};
  int driver_cuda = 0;
  unsigned int count = 0;
  nvml.SystemGetDriverVersion(driver, sizeof(driver));
  report.driver = driver;
  nvml.SystemGetCudaDriverVersion(&driver_cuda);
  if (const int code = nvml.DeviceGetCount(&count); code != kNvmlSuccess) {
    report.warnings.push_back(absl::StrCat("counting GPUs: ", nvml.Explain(code)));
    return;
  }
  std::vector<Gpu> gpus;
  for (unsigned int index = 0; index < count; ++index) {
    Gpu gpu;
    gpu.index = static_cast<int>(index);
    if (const int code = nvml.DeviceGetHandleByIndex(index, &gpu.handle); code != kNvmlSuccess) {
      report.warnings.push_back(absl::StrCat("GPU ", index, ": ", nvml.Explain(code)));
      continue;
    }
    if (Describe(nvml, options, driver_cuda, gpu, report)) gpus.push_back(std::move(gpu));
  }
  NameSwitches(nvml, gpus);
  gpus = Visible(gpus, options.visible);
  for (size_t i = 0; i < gpus.size(); ++i) gpus[i].device.set_name(absl::StrCat("cuda:", i));
  for (size_t i = 0; i < gpus.size(); ++i) {
    if (options.offered.has_value() &&
        std::count(options.offered->begin(), options.offered->end(), static_cast<int>(i)) == 0) {
      continue;
    }
    for (size_t j = 0; j < gpus.size(); ++j) {
      const int links = i == j ? 0 : LinksBetween(nvml, gpus[i], gpus[j]);
      if (links > 0) (*gpus[i].device.mutable_nvlinks())[gpus[j].device.name()] = links;
    }
    report.devices.push_back(gpus[i].device);
  }
}

}  // namespace

GpuOptions GpuOptions::FromEnvironment() {
  GpuOptions options;
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) options.visible = visible;
  options.cuda_major = MUSTER_CUDA_MAJOR;
  options.architectures = MUSTER_CUDA_ARCHITECTURES;
  return options;
}

GpuReport DiscoverGpus(const GpuOptions& options) {
  GpuReport report;
  const absl::StatusOr<Nvml> nvml = Nvml::Load(options.library);
  if (!nvml.ok()) {
    if (nvml.status().code() != absl::StatusCode::kNotFound) {
      report.warnings.push_back(absl::StrCat("NVIDIA's driver: ", nvml.status().message()));
    }
    return report;
  }
  if (const int code = nvml->Init(); code != kNvmlSuccess) {
    report.warnings.push_back(absl::StrCat(
        "NVIDIA's driver does not answer: ", nvml->Explain(code),
        "; check that nvidia-smi runs (after an update of the driver the machine needs a reboot)"));
    return report;
  }
  Discover(*nvml, options, report);
  nvml->Shutdown();
  return report;
}

}  // namespace muster::worker
