// What the log of changes keeps of a plan, so that it can be made again (decision_replay.h).
#ifndef MUSTER_COORDINATOR_CORE_PLAN_RECORD_H_
#define MUSTER_COORDINATOR_CORE_PLAN_RECORD_H_

#include <string>
#include <vector>

#include "coordinator/core/jobs.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/workers.h"
#include "coordinator/scheduler/scheduler.h"
#include "coordinator/scheduler/topology.h"
#include "muster/v1/stored.pb.h"

namespace muster::coordinator {

// Without the slots of a Start. Requires: ChangesState(decision).
v1::PlanDecision RecordOf(const Decision& decision);

// Without decisions that change nothing: those of the plan before would be stored again and again.
// To be called before the decisions are carried out. O(jobs decided about), and O(workers away).
v1::PlanRecord RecordPlan(const std::vector<Decision>& decisions, const JobTable& jobs,
                          const Scheduling& scheduling, const WorkerTable& workers);

// Adds what the queue has used.
void AddUsage(const Scheduling& scheduling, const std::string& queue,
              google::protobuf::RepeatedPtrField<v1::QueueUsageChange>& usage);

v1::PlanConditions ConditionsOf(const TopologyRules& rules);
TopologyRules RulesOf(const v1::PlanConditions& conditions);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CORE_PLAN_RECORD_H_
