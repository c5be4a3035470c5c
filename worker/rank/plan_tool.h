// `muster-rank plan`: what a job spec will take.
#ifndef MUSTER_WORKER_RANK_PLAN_TOOL_H_
#define MUSTER_WORKER_RANK_PLAN_TOOL_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"

namespace muster::worker {

struct PlanArguments {
  std::string spec;           // file with a JobSpec in Protobuf's binary form
  int64_t device_memory = 0;  // bytes for each rank; 0: do not compare with a device
};

// Prints one JSON object: the plan and, where it does not fit, the cheapest change that does fit.
// kNotFound and kInvalidArgument name the file, or the field of the spec.
absl::Status RunPlan(const PlanArguments& arguments);

}  // namespace muster::worker

#endif  // MUSTER_WORKER_RANK_PLAN_TOOL_H_
