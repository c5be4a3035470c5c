#include "worker/rank/memory_check.h"

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "parallel/train/failure.h"
#include "worker/rank/job_plan.h"
#include "worker/rank/plan_advice.h"

namespace muster::worker {
namespace {

using parallel::FailureDomain;
using parallel::Mark;

// Says how much of a GPU other processes hold: none, unless ranks share it.
std::string HeldByOthers(const kernels::DeviceMemory& memory) {
  const int64_t held = memory.total - memory.free - parallel::kCudaContextBytes;
  if (held < memory.total / 50) return "";
  return absl::StrFormat(" (other processes hold %s; nvidia-smi shows which)", BytesText(held));
}

// The host's memory for one of the job's ranks on it; no value where the system does not report it.
absl::StatusOr<std::optional<int64_t>> AvailableHostBytes(const v1::RankAssignment& assignment) {
  const auto host = kernels::MakeCpuDevice(1)->Memory();
  if (absl::IsUnavailable(host.status())) return std::nullopt;
  if (!host.ok()) return host.status();
  return host->total / std::max(1, assignment.local_ranks());
}

}  // namespace

int64_t AvailableBytes(const v1::RankAssignment& assignment, kernels::DeviceKind kind,
                       const kernels::DeviceMemory& memory) {
  if (kind == kernels::DeviceKind::kCpu) {
    return memory.total / std::max(1, assignment.local_ranks());
  }
  const int64_t free = memory.free + parallel::kCudaContextBytes;
  const int64_t limit = assignment.device_memory_limit_bytes();
  return limit > 0 ? std::min(free, limit) : free;
}

absl::Status CheckFits(const v1::RankAssignment& assignment, const parallel::MemoryUse& use,
                       const parallel::PerAxis& coordinate, kernels::DeviceKind kind,
                       const std::string& device, const kernels::DeviceMemory& memory,
                       std::optional<int64_t> host_available) {
  const int64_t needed = NeededBytes(use, kind);
  const int64_t available = AvailableBytes(assignment, kind, memory);
  const std::string who =
      absl::StrFormat("rank %d (%s) needs ", assignment.rank(), coordinate.ToString());
  const std::string each = absl::StrFormat(" for each of the job's %d ranks on this machine",
                                           std::max(1, assignment.local_ranks()));
  std::string message;
  if (needed > available) {
    const bool limited =
        kind == kernels::DeviceKind::kCuda && available == assignment.device_memory_limit_bytes();
    message = absl::StrFormat(
        "%s%s, and %s has %s%s: %s", who, BytesText(needed), device, BytesText(available),
        kind == kernels::DeviceKind::kCpu ? each
        : limited ? absl::StrFormat(" of %s for a resources.share of %g", BytesText(memory.total),
                                    assignment.spec().resources().share())
                  : absl::StrFormat(" free of %s%s", BytesText(memory.total), HeldByOthers(memory)),
        use.ToString());
  } else if (host_available.has_value() && use.host_bytes() > *host_available) {
    // Pinning more than the host has makes the kernel kill this process, or another one.
    message = absl::StrFormat("%s%s of the host's memory, which has %s%s: %s", who,
                              BytesText(use.host_bytes()), BytesText(*host_available), each,
                              use.HostText());
  } else {
    return absl::OkStatus();
  }
  const auto change = host_available.has_value()
                          ? CheapestFit(assignment.spec(), available, *host_available)
                          : CheapestFit(assignment.spec(), available);
  absl::StrAppend(&message, ". ", AdviceText(change));
  return Mark(absl::ResourceExhaustedError(message), FailureDomain::kMemory);
}

absl::Status CheckMemory(const v1::RankAssignment& assignment, const parallel::MemoryUse& use,
                         const parallel::PerAxis& coordinate, kernels::Device& device,
                         std::optional<kernels::DeviceMemory> memory) {
  if (!memory.has_value()) {
    auto asked = device.Memory();
    if (absl::IsUnavailable(asked.status())) return absl::OkStatus();
    if (!asked.ok()) return Mark(asked.status(), FailureDomain::kDevice);
    memory = *asked;
  }
  const kernels::DeviceKind kind = device.kind();
  std::optional<int64_t> host;
  if (kind == kernels::DeviceKind::kCuda) {
    ASSIGN_OR_RETURN(host, AvailableHostBytes(assignment));
  }
  return CheckFits(assignment, use, coordinate, kind, device.name(), *memory, host);
}

}  // namespace muster::worker
