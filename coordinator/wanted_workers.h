// How many workers of a group that is scaled from outside are wanted, for the devices that all jobs
// want as whole gangs. Pure.
#ifndef MUSTER_COORDINATOR_WANTED_WORKERS_H_
#define MUSTER_COORDINATOR_WANTED_WORKERS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "coordinator/core/job_view.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Workers GROUP-0 to GROUP-(n-1), as the pods of a StatefulSet are called. The last one is removed
// first.
struct WorkerGroup {
  std::string name;
  v1::DeviceKind device = v1::DEVICE_KIND_CPU;
  int devices = 1;        // of each worker
  int workers_max = 100;  // that there may be
};
// From the metadata of a trigger: `workers`, `device` (cpu or cuda), `devicesPerWorker` and
// `maxWorkers`; others are passed over. kInvalidArgument names the one that is wrong.
absl::StatusOr<WorkerGroup> ParseWorkerGroup(const std::map<std::string, std::string>& metadata);

// Enough for every job of the kind that is not finished and waits for nothing but devices, less the
// devices of workers that are not of the group; and never fewer than keep each worker on which a
// rank is. Jobs that share devices count by their shares, rounded up to a half, a third and so on.
// A gang that does not fit even if there were workers_max is left out, since a part of it is of no
// use.
int WantedWorkers(const WorkerGroup& group, const std::vector<JobView>& unfinished,
                  const std::vector<v1::Worker>& workers);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_WANTED_WORKERS_H_
