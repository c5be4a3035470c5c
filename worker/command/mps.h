// What holds a client of MPS to its share of a GPU.
#ifndef MUSTER_WORKER_COMMAND_MPS_H_
#define MUSTER_WORKER_COMMAND_MPS_H_

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/str_cat.h"
#include "muster/v1/rank.pb.h"
#include "proto/spec/share.h"

namespace muster::worker {

// The variables of NVIDIA's Multi-Process Service for a rank that shares its GPU, which is number
// `ordinal` of those that the rank sees: the percentage of multiprocessors, rounded to 1 or more,
// and the memory in MiB that it may take.
inline std::map<std::string, std::string> MpsVariables(const v1::RankAssignment& assignment,
                                                       int ordinal) {
  const int32_t share = spec::ShareOf(assignment.spec());
  const int64_t mib = assignment.device_memory_limit_bytes() >> 20;
  std::map<std::string, std::string> variables = {
      {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", absl::StrCat(std::max(1, (share + 5) / 10))}};
  if (mib > 0) {
    variables["CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"] = absl::StrCat(ordinal, "=", mib, "M");
  }
  return variables;
}

}  // namespace muster::worker

#endif  // MUSTER_WORKER_COMMAND_MPS_H_
