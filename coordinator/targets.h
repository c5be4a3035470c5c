// What Prometheus finds at the coordinator's /targets: every process of the cluster that serves
// metrics, in the form of its HTTP service discovery.
#ifndef MUSTER_COORDINATOR_TARGETS_H_
#define MUSTER_COORDINATOR_TARGETS_H_

#include <string>

#include "coordinator/published_state.h"

namespace muster::coordinator {

// A JSON list of {"targets": ["HOST:PORT"], "labels": {...}}, always the whole cluster: the
// coordinator itself, which serves metrics at `own_address`, workers that are not lost by name,
// then ranks by job and rank. Labels: `cluster` is the cluster's id and
// `component` coordinator, worker or rank; workers and ranks
// have `worker`; ranks also __meta_muster_job_name and __meta_muster_rank, which become labels only
// where relabelling asks for it, since the series of a rank carry both already.
std::string TargetsJson(const PublishedState& published, const std::string& cluster_id,
                        const std::string& own_address);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_TARGETS_H_
