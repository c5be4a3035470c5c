// Answers why a job or an array waits, and what would become of a spec.
#ifndef MUSTER_COORDINATOR_CORE_EXPLAINER_H_
#define MUSTER_COORDINATOR_CORE_EXPLAINER_H_

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "coordinator/core/arrays.h"
#include "coordinator/core/core.h"
#include "coordinator/core/jobs.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/workers.h"
#include "muster/v1/job.pb.h"

namespace muster::coordinator {

// Changes nothing that can be seen otherwise; it asks the scheduler, which tries and rolls back.
// Thread: the core's. What it is made of outlives it.
class Explainer {
 public:
  Explainer(const JobTable& jobs, WorkerTable& workers, Scheduling& scheduling,
            const Reservations& reservations)
      : jobs_(jobs), workers_(workers), scheduling_(scheduling), reservations_(reservations) {}

  // As Core::Explain.
  absl::StatusOr<Explained> Explain(const ExplainQuery& about, absl::Time now);

 private:
  // Explained without `deadline`.
  absl::StatusOr<Explained> ExplainWait(const ExplainQuery& about, absl::Time now);
  // Why its tasks wait.
  v1::ArrayOutlook OutlookOf(const Array& array, absl::Time now);

  const JobTable& jobs_;
  WorkerTable& workers_;
  Scheduling& scheduling_;
  const Reservations& reservations_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_EXPLAINER_H_
