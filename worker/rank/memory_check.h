// Whether the memory that a rank will take is available, checked before any of it is taken. All
// numbers are bytes.
#ifndef MUSTER_WORKER_RANK_MEMORY_CHECK_H_
#define MUSTER_WORKER_RANK_MEMORY_CHECK_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "kernels/device/device.h"
#include "muster/v1/rank.pb.h"
#include "parallel/mesh/mesh.h"
#include "parallel/train/memory.h"

namespace muster::worker {

// What one rank may take of `memory`, to be compared with NeededBytes (job_plan.h). Of a GPU: what
// is free now, plus the CUDA context, which already exists; no more than its share of a GPU that
// several jobs share. Of a host: an equal share of the total
// for each of the job's ranks there, because the others take theirs at the same time.
int64_t AvailableBytes(const v1::RankAssignment& assignment, kernels::DeviceKind kind,
                       const kernels::DeviceMemory& memory);

// Compares `use` with what is available to the rank: of its device, whose name is `device`, and
// beside a CUDA device of the host (`host_available`; no value: not known, not compared).
// kResourceExhausted, marked with FailureDomain memory: the message has the rank, the use by
// category and the cheapest change of the spec that fits (plan_advice.h).
absl::Status CheckFits(const v1::RankAssignment& assignment, const parallel::MemoryUse& use,
                       const parallel::PerAxis& coordinate, kernels::DeviceKind kind,
                       const std::string& device, const kernels::DeviceMemory& memory,
                       std::optional<int64_t> host_available);

// CheckFits with what `device` and the host report; `memory` replaces the device's report where it
// is given. OK where the system does not report its memory. A device that fails to answer: its
// status, marked with FailureDomain device.
absl::Status CheckMemory(const v1::RankAssignment& assignment, const parallel::MemoryUse& use,
                         const parallel::PerAxis& coordinate, kernels::Device& device,
                         std::optional<kernels::DeviceMemory> memory);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_MEMORY_CHECK_H_
