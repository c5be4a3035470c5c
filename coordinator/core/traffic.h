// What a job sends along the axes of its mesh, from its spec.
#ifndef MUSTER_COORDINATOR_CORE_TRAFFIC_H_
#define MUSTER_COORDINATOR_CORE_TRAFFIC_H_

#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

// Sets WaitingJob::traffic and traffic_known. For jobs of the engine the bytes are an estimate to a
// factor of about two, which `muster plan` knows exactly. They follow from the layers of the model
// (spec::TotalsOf): tensor groups all-reduce hidden states twice a layer and micro-batch, context
// groups pass the keys and values of attention around three times and the states of scans twice,
// the gradients of all weights are reduced once a step in fp32 (or as the spec says), stages pass
// hidden states on and back. For other jobs weights stand for bytes (WeightOf). Where axes of the
// spec do not multiply to the ranks, all ranks are one ring. Pure.
void AddTraffic(const v1::JobSpec& spec, WaitingJob& job);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_TRAFFIC_H_
