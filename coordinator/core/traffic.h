// What a job sends along the axes of its mesh, from its spec.
#ifndef MUSTER_COORDINATOR_CORE_TRAFFIC_H_
#define MUSTER_COORDINATOR_CORE_TRAFFIC_H_

#include "coordinator/scheduler/waiting_queue.h"
#include "muster/v1/spec.pb.h"

namespace muster::coordinator {

// Sets WaitingJob::traffic and traffic_known. For jobs of the engine the bytes are an estimate to a
// factor of about two, which `muster plan` knows exactly: all layers count as transformer layers of
// 12 hidden^2 parameters (family mamba2: 6), tensor groups all-reduce hidden states four times a
// layer and micro-batch, context groups pass keys and values around three times, gradients are
// reduced once a step in fp32 (or as the spec says), stages pass hidden states on and back. For
// other jobs weights stand for bytes (WeightOf). Where axes of the spec do not multiply to the
// ranks, all ranks are one ring. Pure.
void AddTraffic(const v1::JobSpec& spec, WaitingJob& job);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_TRAFFIC_H_
