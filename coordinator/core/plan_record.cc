#include "coordinator/core/plan_record.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <variant>

#include "base/check.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/schema.h"

namespace muster::coordinator {
namespace {

void AddSlots(const std::vector<Slot>& slots, v1::PlanDecision& record) {
  for (const Slot& slot : slots) {
    v1::KeptSlot& added = *record.add_slots();
    added.set_worker(slot.worker.value());
    added.set_device(slot.device);
  }
}

struct Recorder {
  v1::PlanDecision operator()(const Start& start) const {
    return Of(v1::PLAN_DECISION_KIND_START, start.job);
  }
  v1::PlanDecision operator()(const Preempt& preempt) const {
    v1::PlanDecision record = Of(v1::PLAN_DECISION_KIND_PREEMPT, preempt.job);
    AddSlots(preempt.eviction.slots, record);
    for (const JobId& id : preempt.eviction.stopped) record.add_stopped(id.value());
    for (const JobId& id : preempt.eviction.outbid) record.add_outbid(id.value());
    return record;
  }
  v1::PlanDecision operator()(const GiveUpKept& give_up) const {
    return Of(v1::PLAN_DECISION_KIND_GIVE_UP_KEPT, give_up.job);
  }
  v1::PlanDecision operator()(const Resize& resize) const {
    v1::PlanDecision record = Of(v1::PLAN_DECISION_KIND_RESIZE, resize.resized.job);
    AddSlots(resize.resized.slots, record);
    record.set_for_job(resize.for_job.value());
    return record;
  }
  v1::PlanDecision operator()(const Reserve&) const { return {}; }  // not recorded
  static v1::PlanDecision Of(v1::PlanDecisionKind kind, const JobId& job) {
    v1::PlanDecision record;
    record.set_kind(kind);
    record.set_job(job.value());
    return record;
  }
};

}  // namespace

v1::PlanDecision RecordOf(const Decision& decision) {
  CHECK(ChangesState(decision));
  return std::visit(Recorder(), decision);
}

void AddUsage(const Scheduling& scheduling, const std::string& queue,
              google::protobuf::RepeatedPtrField<v1::QueueUsageChange>& usage) {
  v1::QueueUsageChange& added = *usage.Add();
  added.set_queue(queue);
  if (std::optional<v1::QueueUsage> used = scheduling.history().Stored(queue); used.has_value()) {
    *added.mutable_usage() = *std::move(used);
  }
}

v1::PlanRecord RecordPlan(const std::vector<Decision>& decisions, const JobTable& jobs,
                          const Scheduling& scheduling, const WorkerTable& workers) {
  v1::PlanRecord record;
  std::set<JobId> changed;
  for (const Decision& decision : decisions) {
    if (!ChangesState(decision)) continue;
    v1::PlanDecision& added = *record.add_decisions();
    added = RecordOf(decision);
    changed.insert(JobId(added.job()));
    for (const std::string& id : added.stopped()) changed.insert(JobId(id));
    for (const std::string& id : added.outbid()) changed.insert(JobId(id));
  }
  std::set<std::string> queues;
  for (const JobId& id : changed) {
    const JobEntry& job = *jobs.Find(id);
    v1::StateRow state = job.state;
    state.clear_account();
    state.clear_gone();
    if (job.has_attempt()) {
      for (v1::RankRun& run : job.gang.Gone()) *state.add_gone() = std::move(run);
    }
    v1::RowChange& row = *record.add_before();
    row.set_table(Name(Table::kStates));
    row.set_key(id.value());
    row.set_value(schema::Serialize(state));
    const int queue = scheduling.tree().Find(job.spec().queue());
    if (queue == QueueTree::kNone) continue;
    for (const int above : scheduling.tree().Path(queue)) {
      queues.insert(scheduling.tree().at(above).name);
    }
  }
  for (const std::string& queue : queues) {
    AddUsage(scheduling, queue, *record.mutable_usage_before());
  }
  if (workers.away().size() > kAwayRecordedMax) {
    record.set_incomplete("too many workers were not connected to name them");
  } else {
    for (const WorkerId& id : workers.away()) record.add_away(id.value());
  }
  if (scheduling.MaySplitDevices()) {
    if (workers.undivided().size() > kAwayRecordedMax) {
      record.set_incomplete("too many daemons could not share devices to name their workers");
    } else {
      for (const WorkerId& id : workers.undivided()) record.add_undivided(id.value());
    }
  }
  return record;
}

v1::PlanConditions ConditionsOf(const TopologyRules& rules) {
  v1::PlanConditions conditions;
  for (const std::string& label : rules.labels) conditions.add_labels(label);
  for (const auto& [worker, path] : rules.workers) {
    v1::WorkerDomains& domains = *conditions.add_workers();
    domains.set_worker(worker);
    for (const std::string& name : path.names) domains.add_domains(name);
  }
  return conditions;
}

TopologyRules RulesOf(const v1::PlanConditions& conditions) {
  TopologyRules rules;
  const auto take = [](const auto& from, auto& to) {
    std::copy_n(from.begin(), std::min<size_t>(to.size(), static_cast<size_t>(from.size())),
                to.begin());
  };
  take(conditions.labels(), rules.labels);
  for (const v1::WorkerDomains& worker : conditions.workers()) {
    take(worker.domains(), rules.workers[worker.worker()].names);
  }
  return rules;
}

}  // namespace muster::coordinator
