// The part of NVIDIA's management library that the daemon uses. Declared here, because its header
// comes with CUDA and the daemon is built without. Values and layouts are those of the library's
// documented interface, which never change under one symbol name
// (https://docs.nvidia.com/deploy/nvml-api).
#ifndef MUSTER_WORKER_DAEMON_NVML_H_
#define MUSTER_WORKER_DAEMON_NVML_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::worker {

using NvmlDevice = struct NvmlDeviceHandle*;

struct NvmlMemory {
  unsigned long long total, free, used;  // bytes
};

struct NvmlUtilization {
  unsigned int gpu, memory;  // percent of the time in which a kernel ran, or memory was accessed
};

struct NvmlPciInfo {
  char legacy_bus_id[16];
  unsigned int domain, bus, device;
  unsigned int pci_device_id, pci_subsystem_id;
  char bus_id[32];  // "00000000:1B:00.0"
};

struct NvmlEvent {
  NvmlDevice device;
  unsigned long long type, data;  // data of kNvmlEventXid: its number
  unsigned int gpu_instance, compute_instance;
};
using NvmlEventSet = struct NvmlEventSetHandle*;

inline constexpr int kNvmlSuccess = 0;
// nvmlGpuTopologyLevel_t: the devices are behind several PCIe switches, and below one host bridge.
inline constexpr int kNvmlTopologyMultiple = 20;
inline constexpr int kNvmlErrorTimeout = 10;
inline constexpr int kNvmlErrorGpuIsLost = 15;
inline constexpr int kNvmlUncorrectedEcc = 1;
inline constexpr int kNvmlVolatileEcc = 0;  // since the driver was loaded
inline constexpr int kNvmlCorrectedEcc = 0;
inline constexpr int kNvmlSensorGpu = 0;
inline constexpr int kNvmlClockSm = 1;
inline constexpr int kNvmlClockMemory = 2;
inline constexpr int kNvmlP2pNvlink = 2;
inline constexpr int kNvmlP2pOk = 0;
inline constexpr int kNvmlRemoteIsSwitch = 2;
inline constexpr unsigned int kNvmlLinksMax = 18;
inline constexpr unsigned long long kNvmlEventXid = 8;  // nvmlEventTypeXidCriticalError

// Functions return an NVML code; the optional ones are null where the library has none.
struct Nvml {
  // kNotFound: no driver on this machine. Else what the library says.
  static absl::StatusOr<Nvml> Load(const std::string& library);
  std::string Explain(int code) const;

  int (*Init)() = nullptr;
  int (*Shutdown)() = nullptr;
  const char* (*ErrorString)(int) = nullptr;
  int (*SystemGetDriverVersion)(char*, unsigned int) = nullptr;
  int (*SystemGetCudaDriverVersion)(int*) = nullptr;
  int (*DeviceGetCount)(unsigned int*) = nullptr;
  int (*DeviceGetHandleByIndex)(unsigned int, NvmlDevice*) = nullptr;
  int (*DeviceGetUUID)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*DeviceGetName)(NvmlDevice, char*, unsigned int) = nullptr;
  int (*DeviceGetMemoryInfo)(NvmlDevice, NvmlMemory*) = nullptr;
  int (*DeviceGetPciInfo)(NvmlDevice, NvmlPciInfo*) = nullptr;
  int (*DeviceGetCudaComputeCapability)(NvmlDevice, int*, int*) = nullptr;
  int (*DeviceGetTotalEccErrors)(NvmlDevice, int, int, unsigned long long*) = nullptr;
  int (*DeviceGetRemappedRows)(NvmlDevice, unsigned int* corrected, unsigned int* uncorrected,
                               unsigned int* pending, unsigned int* failed) = nullptr;
  int (*DeviceGetNvLinkState)(NvmlDevice, unsigned int, int*) = nullptr;
  int (*DeviceGetNvLinkRemoteDeviceType)(NvmlDevice, unsigned int, int*) = nullptr;
  int (*DeviceGetTopologyCommonAncestor)(NvmlDevice, NvmlDevice, int*) = nullptr;
  int (*DeviceGetNvLinkRemotePciInfo)(NvmlDevice, unsigned int, NvmlPciInfo*) = nullptr;
  int (*DeviceGetP2PStatus)(NvmlDevice, NvmlDevice, int, int*) = nullptr;
  int (*DeviceGetPowerUsage)(NvmlDevice, unsigned int* milliwatts) = nullptr;
  int (*DeviceGetEnforcedPowerLimit)(NvmlDevice, unsigned int* milliwatts) = nullptr;
  int (*DeviceGetTotalEnergyConsumption)(NvmlDevice, unsigned long long* millijoules) = nullptr;
  int (*DeviceGetTemperature)(NvmlDevice, int sensor, unsigned int* celsius) = nullptr;
  int (*DeviceGetClockInfo)(NvmlDevice, int clock, unsigned int* megahertz) = nullptr;
  int (*DeviceGetUtilizationRates)(NvmlDevice, NvmlUtilization*) = nullptr;
  int (*DeviceGetCurrentClocksThrottleReasons)(NvmlDevice, unsigned long long*) = nullptr;
  // All four or none.
  int (*EventSetCreate)(NvmlEventSet*) = nullptr;
  int (*EventSetFree)(NvmlEventSet) = nullptr;
  int (*DeviceRegisterEvents)(NvmlDevice, unsigned long long types, NvmlEventSet) = nullptr;
  int (*EventSetWait)(NvmlEventSet, NvmlEvent*, unsigned int milliseconds) = nullptr;
};

}  // namespace muster::worker

#endif  // MUSTER_WORKER_DAEMON_NVML_H_
