// Devices that operators keep for the jobs of one queue, or of one label, for a time.
#ifndef MUSTER_COORDINATOR_CORE_RESERVATIONS_H_
#define MUSTER_COORDINATOR_CORE_RESERVATIONS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/turn.h"
#include "coordinator/core/workers.h"
#include "muster/v1/fleet.pb.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

// Nothing else changes Worker.reservations. No device is in two of them, those of one name are the
// same on every worker but for the devices, and the deadline is that of the one that ends first.
// After a change, which jobs may take which devices has changed too: the caller looks at those
// again. Thread: the core's. Bound: kReservationsMax.
class Reservations {
 public:
  // Adds the reservation, in place of one of its name. kInvalidArgument, kNotFound,
  // kFailedPrecondition: the request, which then changes nothing.
  absl::Status Reserve(const v1::ReserveRequest& request, WorkerTable& workers,
                       Deadlines& deadlines, Turn& turn);
  // kNotFound.
  absl::Status End(const std::string& name, WorkerTable& workers, Deadlines& deadlines, Turn& turn);
  // Ends those whose time is over.
  void Expire(WorkerTable& workers, Deadlines& deadlines, Turn& turn);
  // The workers are others than before.
  void Refresh(const WorkerTable& workers, Deadlines& deadlines);

  // The names of those that are for jobs of this spec, ascending.
  std::vector<std::string> For(const v1::JobSpec& spec) const;

 private:
  absl::Status Check(const v1::ReserveRequest& request, const WorkerTable& workers,
                     absl::Time now) const;

  std::map<std::string, v1::Reservation> by_name_;  // without devices
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_RESERVATIONS_H_
