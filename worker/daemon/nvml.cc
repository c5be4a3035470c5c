#include "worker/daemon/nvml.h"

#include "absl/strings/str_cat.h"
#include "base/shared_library.h"
#include "base/status_macros.h"

namespace muster::worker {

absl::StatusOr<Nvml> Nvml::Load(const std::string& library) {
  // Where container toolkits put the driver when the loader does not know.
  ASSIGN_OR_RETURN(const SharedLibrary loaded,
                   SharedLibrary::Open(library, {"/usr/local/nvidia/lib64", "/usr/lib64",
                                                 "/usr/lib/x86_64-linux-gnu"}));
  Nvml nvml;
  RETURN_IF_ERROR(loaded.Resolve("nvmlInit_v2", nvml.Init));
  RETURN_IF_ERROR(loaded.Resolve("nvmlShutdown", nvml.Shutdown));
  RETURN_IF_ERROR(loaded.Resolve("nvmlErrorString", nvml.ErrorString));
  RETURN_IF_ERROR(loaded.Resolve("nvmlSystemGetDriverVersion", nvml.SystemGetDriverVersion));
  RETURN_IF_ERROR(
      loaded.Resolve("nvmlSystemGetCudaDriverVersion_v2", nvml.SystemGetCudaDriverVersion));
  RETURN_IF_ERROR(loaded.Resolve("nvmlDeviceGetCount_v2", nvml.DeviceGetCount));
  RETURN_IF_ERROR(loaded.Resolve("nvmlDeviceGetHandleByIndex_v2", nvml.DeviceGetHandleByIndex));
  RETURN_IF_ERROR(loaded.Resolve("nvmlDeviceGetUUID", nvml.DeviceGetUUID));
  RETURN_IF_ERROR(loaded.Resolve("nvmlDeviceGetName", nvml.DeviceGetName));
  RETURN_IF_ERROR(loaded.Resolve("nvmlDeviceGetMemoryInfo", nvml.DeviceGetMemoryInfo));
  RETURN_IF_ERROR(loaded.Resolve("nvmlDeviceGetPciInfo_v3", nvml.DeviceGetPciInfo));
  RETURN_IF_ERROR(
      loaded.Resolve("nvmlDeviceGetCudaComputeCapability", nvml.DeviceGetCudaComputeCapability));
  // Older libraries lack some of these; what they would tell is then unknown.
  (void)loaded.Resolve("nvmlDeviceGetTotalEccErrors", nvml.DeviceGetTotalEccErrors);
  (void)loaded.Resolve("nvmlDeviceGetRemappedRows", nvml.DeviceGetRemappedRows);
  (void)loaded.Resolve("nvmlDeviceGetNvLinkState", nvml.DeviceGetNvLinkState);
  (void)loaded.Resolve("nvmlDeviceGetNvLinkRemoteDeviceType", nvml.DeviceGetNvLinkRemoteDeviceType);
  (void)loaded.Resolve("nvmlDeviceGetTopologyCommonAncestor", nvml.DeviceGetTopologyCommonAncestor);
  (void)loaded.Resolve("nvmlDeviceGetNvLinkRemotePciInfo_v2", nvml.DeviceGetNvLinkRemotePciInfo);
  (void)loaded.Resolve("nvmlDeviceGetP2PStatus", nvml.DeviceGetP2PStatus);
  (void)loaded.Resolve("nvmlDeviceGetPowerUsage", nvml.DeviceGetPowerUsage);
  (void)loaded.Resolve("nvmlDeviceGetEnforcedPowerLimit", nvml.DeviceGetEnforcedPowerLimit);
  (void)loaded.Resolve("nvmlDeviceGetTotalEnergyConsumption", nvml.DeviceGetTotalEnergyConsumption);
  (void)loaded.Resolve("nvmlDeviceGetTemperature", nvml.DeviceGetTemperature);
  (void)loaded.Resolve("nvmlDeviceGetClockInfo", nvml.DeviceGetClockInfo);
  (void)loaded.Resolve("nvmlDeviceGetUtilizationRates", nvml.DeviceGetUtilizationRates);
  (void)loaded.Resolve("nvmlDeviceGetCurrentClocksThrottleReasons",
                       nvml.DeviceGetCurrentClocksThrottleReasons);
  const bool events = loaded.Resolve("nvmlEventSetCreate", nvml.EventSetCreate).ok() &&
                      loaded.Resolve("nvmlEventSetFree", nvml.EventSetFree).ok() &&
                      loaded.Resolve("nvmlDeviceRegisterEvents", nvml.DeviceRegisterEvents).ok() &&
                      loaded.Resolve("nvmlEventSetWait_v2", nvml.EventSetWait).ok();
  if (!events) nvml.EventSetCreate = nullptr;
  return nvml;
}

std::string Nvml::Explain(int code) const {
  return absl::StrCat(ErrorString(code), " (NVML ", code, ")");
}

}  // namespace muster::worker
