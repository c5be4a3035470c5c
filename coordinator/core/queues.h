// The queues as an operator defined them, and what is stored of them.
#ifndef MUSTER_COORDINATOR_CORE_QUEUES_H_
#define MUSTER_COORDINATOR_CORE_QUEUES_H_

#include "absl/status/status.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/turn.h"
#include "coordinator/store/store.h"
#include "muster/v1/queue.pb.h"

namespace muster::coordinator {

// The tree that plans are made with is that of the stored policy, and what queues have used is
// stored with the turn that changes it. Thread: the core's.
class Queues {
 public:
  // kDataLoss: what is stored cannot be read, or is no policy.
  absl::Status Load(Store& store, Scheduling& scheduling);
  // Defines the queues anew. kInvalidArgument, which then changes nothing.
  absl::Status Define(const v1::QueuePolicy& policy, Scheduling& scheduling, Turn& turn);
  // As they were last defined.
  const v1::QueuePolicy& policy() const { return policy_; }
  // Adds the rows of the queues whose use has changed, also to the entry of the log.
  static void PutUsage(Scheduling& scheduling, Turn& turn);

 private:
  v1::QueuePolicy policy_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_QUEUES_H_
