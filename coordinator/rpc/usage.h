// Device time over any time and by any keys, from the rows of past periods and those of the one
// that is not over.
#ifndef MUSTER_COORDINATOR_RPC_USAGE_H_
#define MUSTER_COORDINATOR_RPC_USAGE_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "coordinator/core/core.h"
#include "coordinator/store/store.h"
#include "muster/v1/job_service.pb.h"

namespace muster::coordinator {

// kInvalidArgument: a key that is not known, or a time that ends before it begins.
absl::Status CheckUsageRequest(const v1::GetUsageRequest& request);

// Reads every row that is kept: call it where nobody waits. `request.job` is an id. kDataLoss: a
// row cannot be read.
absl::StatusOr<v1::GetUsageResponse> SumUsage(Store& store, const OpenUsage& open,
                                              const v1::GetUsageRequest& request);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_RPC_USAGE_H_
