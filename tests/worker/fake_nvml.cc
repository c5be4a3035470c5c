// A management library for tests. The environment variable FAKE_NVML describes its GPUs, in
// "name=value" pairs separated by spaces; defaults are in parentheses:
//   gpus (2)       how many
//   cuda (13000)   what the driver supports
//   cc (90)        compute capability x 10
//   init (0)       code of Init
//   lost (-1)      index of a GPU off the bus
//   links (18)     active NVLinks
//   switches (1)   1: they lead to switches, 0: to the next GPU
//   pending (-1)   index of a GPU with a row to be replaced
//   ecc (0)        errors of GPU 0
//   used (1024)    MiB in use of every GPU
//
// FAKE_NVML_XID names a file. "INDEX XID" in it is an error of that GPU; with "INDEX lost" the GPU
// is off the bus from then on, without an error. The file is removed when the next error is waited
// for, so its absence shows that the first one has been handled.
#include <poll.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "worker/daemon/nvml.h"

namespace {

using muster::worker::NvmlDevice;
using muster::worker::NvmlEvent;
using muster::worker::NvmlEventSet;
using muster::worker::NvmlMemory;
using muster::worker::NvmlPciInfo;

int Setting(const char* name, int otherwise) {
  const char* settings = std::getenv("FAKE_NVML");
  const std::string text = settings == nullptr ? " " : std::string(" ") + settings;
  const size_t at = text.find(std::string(" ") + name + "=");
  return at == std::string::npos ? otherwise : std::atoi(text.c_str() + at + std::strlen(name) + 2);
}

// Handles are index + 1.
int Index(NvmlDevice device) { return static_cast<int>(reinterpret_cast<intptr_t>(device)) - 1; }
// Of this process, while it runs; one that asks for events again has another set, without it.
std::atomic<int> lost_now = -1;
std::atomic<bool> in_set = false;
int Lost(NvmlDevice device) {
  const bool lost = Index(device) == Setting("lost", -1) || Index(device) == lost_now;
  return lost ? muster::worker::kNvmlErrorGpuIsLost : 0;
}
void Address(int index, NvmlPciInfo* pci) {
  std::snprintf(pci->bus_id, sizeof(pci->bus_id), "00000000:%02X:00.0", 0x1A + index);
}

}  // namespace

extern "C" {

int nvmlInit_v2() {
  lost_now = -1;
  in_set = false;
  return Setting("init", 0);
}
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int code) {
  return code == 0    ? "Success"
         : code == 15 ? "GPU is lost"
         : code == 18 ? "Driver/library version mismatch"
                      : "Unknown Error";
}
int nvmlSystemGetDriverVersion(char* text, unsigned int length) {
  std::snprintf(text, length, "580.1.2");
  return 0;
}
int nvmlSystemGetCudaDriverVersion_v2(int* version) {
  *version = Setting("cuda", 13000);
  return 0;
}
int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = static_cast<unsigned int>(Setting("gpus", 2));
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, NvmlDevice* device) {
  *device = reinterpret_cast<NvmlDevice>(static_cast<intptr_t>(index) + 1);
  return 0;
}
int nvmlDeviceGetUUID(NvmlDevice device, char* text, unsigned int length) {
  std::snprintf(text, length, "GPU-%d0000000-aaaa", Index(device));
  return 0;
}
int nvmlDeviceGetName(NvmlDevice, char* text, unsigned int length) {
  std::snprintf(text, length, "NVIDIA Fake");
  return 0;
}
int nvmlDeviceGetMemoryInfo(NvmlDevice device, NvmlMemory* memory) {
  const unsigned long long used = static_cast<unsigned long long>(Setting("used", 1024)) << 20;
  *memory = {80ull << 30, (80ull << 30) - used, used};
  return Lost(device);
}
int nvmlDeviceGetPciInfo_v3(NvmlDevice device, NvmlPciInfo* pci) {
  Address(Index(device), pci);
  return 0;
}
int nvmlDeviceGetCudaComputeCapability(NvmlDevice, int* major, int* minor) {
  *major = Setting("cc", 90) / 10;
  *minor = Setting("cc", 90) % 10;
  return 0;
}
int nvmlDeviceGetTotalEccErrors(NvmlDevice device, int, int, unsigned long long* errors) {
  *errors = Index(device) == 0 ? static_cast<unsigned long long>(Setting("ecc", 0)) : 0;
  return 0;
}
int nvmlDeviceGetRemappedRows(NvmlDevice device, unsigned int* corrected, unsigned int* uncorrected,
                              unsigned int* pending, unsigned int* failed) {
  *corrected = *uncorrected = *failed = 0;
  *pending = Index(device) == Setting("pending", -1) ? 1 : 0;
  return 0;
}
int nvmlDeviceGetNvLinkState(NvmlDevice, unsigned int link, int* active) {
  *active = static_cast<int>(link) < Setting("links", 18) ? 1 : 0;
  return 0;
}
int nvmlDeviceGetTopologyCommonAncestor(NvmlDevice a, NvmlDevice b, int* level) {
  const int below = Setting("below_switch", 1);
  *level = Index(a) / below == Index(b) / below ? 10 : 40;  // one switch, or one NUMA node
  return 0;
}
int nvmlDeviceGetNvLinkRemoteDeviceType(NvmlDevice, unsigned int, int* type) {
  *type = Setting("switches", 1) != 0 ? muster::worker::kNvmlRemoteIsSwitch : 0;
  return 0;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(NvmlDevice device, unsigned int, NvmlPciInfo* pci) {
  Address((Index(device) + 1) % Setting("gpus", 2), pci);
  return 0;
}
int nvmlDeviceGetPowerUsage(NvmlDevice, unsigned int* milliwatts) {
  *milliwatts = 650'000;
  return 0;
}
int nvmlDeviceGetEnforcedPowerLimit(NvmlDevice, unsigned int* milliwatts) {
  *milliwatts = 700'000;
  return 0;
}
int nvmlDeviceGetTotalEnergyConsumption(NvmlDevice, unsigned long long* millijoules) {
  *millijoules = 5'000'000;
  return 0;
}
int nvmlDeviceGetTemperature(NvmlDevice, int, unsigned int* celsius) {
  *celsius = 61;
  return 0;
}
int nvmlDeviceGetClockInfo(NvmlDevice, int clock, unsigned int* megahertz) {
  *megahertz = clock == muster::worker::kNvmlClockSm ? 1755 : 2619;
  return 0;
}
int nvmlDeviceGetUtilizationRates(NvmlDevice, muster::worker::NvmlUtilization* load) {
  *load = {97, 40};
  return 0;
}
int nvmlDeviceGetCurrentClocksThrottleReasons(NvmlDevice device, unsigned long long* reasons) {
  *reasons = Index(device) == 0 ? 0x44 : 0;
  return 0;
}
int nvmlEventSetCreate(NvmlEventSet* set) {
  *set = reinterpret_cast<NvmlEventSet>(static_cast<intptr_t>(1));
  in_set = false;
  return 0;
}
int nvmlEventSetFree(NvmlEventSet) { return 0; }
int nvmlDeviceRegisterEvents(NvmlDevice device, unsigned long long, NvmlEventSet) {
  return Lost(device);
}
int nvmlEventSetWait_v2(NvmlEventSet, NvmlEvent* event, unsigned int milliseconds) {
  static bool delivered = false;
  const char* path = std::getenv("FAKE_NVML_XID");
  if (path == nullptr) return muster::worker::kNvmlErrorTimeout;
  if (delivered) std::remove(path);
  delivered = false;
  for (unsigned int waited = 0; waited < milliseconds; waited += 5) {
    // For as long as it is in the set.
    if (in_set) return muster::worker::kNvmlErrorGpuIsLost;
    std::ifstream file(path);
    int index = 0;
    std::string what;
    if (file >> index >> what && what == "lost") {
      lost_now = index;
      in_set = true;
      std::remove(path);
      continue;
    }
    if (!what.empty()) {
      event->data = std::strtoull(what.c_str(), nullptr, 10);
      event->device = reinterpret_cast<NvmlDevice>(static_cast<intptr_t>(index) + 1);
      event->type = muster::worker::kNvmlEventXid;
      delivered = true;
      return 0;
    }
    ::poll(nullptr, 0, 5);
  }
  return muster::worker::kNvmlErrorTimeout;
}
int nvmlDeviceGetP2PStatus(NvmlDevice, NvmlDevice, int, int* status) {
  *status = muster::worker::kNvmlP2pOk;
  return 0;
}

}  // extern "C"
