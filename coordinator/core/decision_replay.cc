#include "coordinator/core/decision_replay.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "coordinator/core/deadlines.h"
#include "coordinator/core/plan_record.h"
#include "coordinator/core/planned_job.h"
#include "coordinator/core/reservations.h"
#include "coordinator/core/scheduling.h"
#include "coordinator/core/schema.h"
#include "coordinator/core/workers.h"
#include "proto/spec/share.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr char kNoConditions[] =
    "the log begins behind the start of the coordinator that decided it";
constexpr char kNoRecord[] = "decided by a version that kept no record of its plans";
constexpr char kContradiction[] = "rows of its time contradict each other";

template <typename Message>
absl::Status ReadRow(const LoggedRows& rows, Table table, const std::string& key,
                     std::optional<Message>& message) {
  message.reset();
  const auto found = rows.find({table, key});
  if (found == rows.end()) return absl::OkStatus();
  return schema::Parse(table, key, found->second, message.emplace());
}

// "w-1/cuda:0, w-1/cuda:1"; of many the first and the last.
std::string SlotsText(const google::protobuf::RepeatedPtrField<v1::KeptSlot>& slots) {
  constexpr int kNamedMax = 8;
  const auto name = [&slots](int i) {
    return absl::StrCat(slots[i].worker(), "/", slots[i].device());
  };
  if (slots.size() > kNamedMax) {
    return absl::StrCat(slots.size(), " slots, ", name(0), " to ", name(slots.size() - 1));
  }
  std::vector<std::string> names;
  for (int i = 0; i < slots.size(); ++i) names.push_back(name(i));
  return absl::StrJoin(names, ", ");
}

std::string Text(const v1::PlanDecision& decision) {
  switch (decision.kind()) {
    case v1::PLAN_DECISION_KIND_START:
      return absl::StrCat("starts on ", SlotsText(decision.slots()));
    case v1::PLAN_DECISION_KIND_PREEMPT: {
      std::string text = absl::StrCat("gets ", SlotsText(decision.slots()), " kept");
      if (!decision.stopped().empty()) {
        absl::StrAppend(&text, ", for which these stop: ", absl::StrJoin(decision.stopped(), ", "));
      }
      if (!decision.outbid().empty()) {
        absl::StrAppend(&text, ", which these lose: ", absl::StrJoin(decision.outbid(), ", "));
      }
      return text;
    }
    case v1::PLAN_DECISION_KIND_GIVE_UP_KEPT:
      return "loses the slots kept for it";
    case v1::PLAN_DECISION_KIND_RESIZE:
      return absl::StrCat(
          "goes on with ", decision.slots_size(), " rank(s) on ", SlotsText(decision.slots()),
          decision.for_job().empty() ? ""
                                     : absl::StrCat(", to make room for ", decision.for_job()));
    default:
      return "something that this version does not know";
  }
}

// What was decided about one job, by job.
using ByJob = std::map<std::string, std::vector<const v1::PlanDecision*>>;

ByJob GroupByJob(const std::vector<v1::PlanDecision>& decisions) {
  ByJob out;
  for (const v1::PlanDecision& decision : decisions) out[decision.job()].push_back(&decision);
  return out;
}

bool Same(const std::vector<const v1::PlanDecision*>& a,
          const std::vector<const v1::PlanDecision*>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto* one, const auto* other) {
    return schema::Serialize(*one) == schema::Serialize(*other);
  });
}

std::string Text(const std::vector<const v1::PlanDecision*>& decisions) {
  if (decisions.empty()) return "nothing";
  std::vector<std::string> texts;
  for (const v1::PlanDecision* decision : decisions) texts.push_back(Text(*decision));
  return absl::StrJoin(texts, ", then ");
}

void AddSlots(const google::protobuf::RepeatedPtrField<v1::Placement>& placements,
              v1::PlanDecision& decision) {
  for (const v1::Placement& placement : placements) {
    v1::KeptSlot& slot = *decision.add_slots();
    slot.set_worker(placement.worker());
    slot.set_device(placement.device());
  }
}

// Whether the entry starts a job. One whose ranks are replaced has started before.
bool Starts(const v1::LogEntry& entry) {
  std::set<std::string> attempts;
  for (const v1::RowChange& change : entry.changes()) {
    v1::AttemptRow attempt;
    if (change.table() == Name(Table::kAttempts) && attempt.ParseFromString(change.value()) &&
        attempt.membership() <= 1) {
      attempts.insert(change.key());
    }
  }
  if (attempts.empty()) return false;
  return std::any_of(
      entry.changes().begin(), entry.changes().end(), [&](const v1::RowChange& change) {
        if (change.table() != Name(Table::kStates) || !change.has_value()) return false;
        v1::StateRow state;
        return state.ParseFromString(change.value()) && state.attempt_live() &&
               state.attempt_state() == v1::ATTEMPT_STATE_ALLOCATED &&
               attempts.contains(
                   schema::Encode(schema::JobKey{JobId(change.key()), {state.epoch()}}));
      });
}

}  // namespace

// What plans are made from, without what daemons report and users see.
class DecisionReplay::Cluster {
 public:
  explicit Cluster(TopologyRules rules) { workers_.SetTopology(std::move(rules)); }

  // Brings these jobs and workers to what their rows say, or, for some jobs, `states` instead.
  // False: the rows contradict each other.
  absl::StatusOr<bool> Update(std::set<JobId> jobs, const std::set<WorkerId>& workers,
                              const LoggedRows& rows, const States& states, absl::Time now);
  absl::Status SetPolicy(const LoggedRows& rows, absl::Time now);
  // The plan of `now`, with these workers away and queues that have used this.
  std::vector<Decision> Plan(const v1::PlanRecord& record, const Usage& usage, absl::Time now);

 private:
  struct Part {  // what a job has in the cluster
    std::vector<v1::Placement> held;
    Epoch epoch;
    std::vector<v1::KeptSlot> kept;
  };

  absl::StatusOr<bool> UpdateWorker(const WorkerId& id, const LoggedRows& rows, absl::Time now,
                                    bool& reservations_changed);
  void TakeOut(const JobId& id, absl::Time now);
  absl::StatusOr<bool> PutIn(const JobId& id, const LoggedRows& rows, const States& states,
                             absl::Time now);
  static absl::Status ReadAttempt(const LoggedRows& rows, JobEntry& job, absl::Time now);
  void Connect(WorkerEntry& worker) { workers_.OpenSession(worker, SessionId(++last_session_)); }

  WorkerTable workers_;
  Scheduling scheduling_{workers_.slots()};
  Reservations reservations_;
  Deadlines deadlines_;          // nobody looks at them
  std::map<JobId, Part> parts_;  // of live jobs
  uint64_t last_session_ = 0;
};

absl::StatusOr<bool> DecisionReplay::Cluster::Update(std::set<JobId> jobs,
                                                     const std::set<WorkerId>& workers,
                                                     const LoggedRows& rows, const States& states,
                                                     absl::Time now) {
  bool sound = true;
  for (const JobId& id : jobs) TakeOut(id, now);
  bool reservations_changed = false;
  for (const WorkerId& id : workers) {
    ASSIGN_OR_RETURN(const bool good, UpdateWorker(id, rows, now, reservations_changed));
    sound &= good;
  }
  if (reservations_changed) {
    reservations_.Refresh(workers_, deadlines_);
    for (const auto& [id, part] : std::map<JobId, Part>(parts_)) {
      TakeOut(id, now);
      jobs.insert(id);
    }
  }
  for (const JobId& id : jobs) {
    ASSIGN_OR_RETURN(const bool good, PutIn(id, rows, states, now));
    sound &= good;
  }
  return sound;
}

absl::StatusOr<bool> DecisionReplay::Cluster::UpdateWorker(const WorkerId& id,
                                                           const LoggedRows& rows, absl::Time now,
                                                           bool& reservations_changed) {
  std::optional<v1::Worker> row;
  RETURN_IF_ERROR(ReadRow(rows, Table::kWorkers, id.value(), row));
  WorkerEntry* known = workers_.Find(id);
  const auto reserved = [](const v1::Worker& worker) {
    std::string text;
    for (const v1::Reservation& one : worker.reservations()) text += schema::Serialize(one) + '\n';
    return text;
  };
  const std::string before = known == nullptr ? "" : reserved(known->row);
  if (!row.has_value()) {
    if (known == nullptr) return true;
    reservations_changed |= !before.empty();
    if (!known->held.empty()) return false;
    Batch unused;
    workers_.Remove(id, unused);
    return true;
  }
  reservations_changed |= before != reserved(*row);
  workers_.Recover(*std::move(row), now);
  if (WorkerEntry& worker = *workers_.Find(id); !worker.session.has_value()) Connect(worker);
  return true;
}

void DecisionReplay::Cluster::TakeOut(const JobId& id, absl::Time now) {
  scheduling_.Remove(id);
  scheduling_.RemoveRunning(id, now);
  scheduling_.DropKept(id);
  const auto part = parts_.find(id);
  if (part == parts_.end()) return;
  for (const v1::Placement& placement : part->second.held) {
    workers_.Free(placement, id, part->second.epoch);
  }
  for (const v1::KeptSlot& slot : part->second.kept) {
    workers_.DropKept(WorkerId(slot.worker()), slot.device(), id);
  }
  parts_.erase(part);
}

absl::Status DecisionReplay::Cluster::ReadAttempt(const LoggedRows& rows, JobEntry& job,
                                                  absl::Time now) {
  const std::string key = schema::Encode(schema::JobKey{job.id(), {job.epoch().value()}});
  std::optional<v1::AttemptRow> attempt;
  RETURN_IF_ERROR(ReadRow(rows, Table::kAttempts, key, attempt));
  if (attempt.has_value()) job.attempt = *std::move(attempt);
  job.gang = Gang(job.attempt, now);
  for (const v1::RankRun& run : job.state.gone()) job.gang.RecoverGone(run);
  // Those of this attempt sort behind the key of the attempt.
  for (auto row = rows.lower_bound({Table::kCheckpoints, key});
       row != rows.end() && row->first.first == Table::kCheckpoints &&
       absl::StartsWith(row->first.second, key);
       ++row) {
    v1::CheckpointRecord record;
    RETURN_IF_ERROR(schema::Parse(Table::kCheckpoints, row->first.second, row->second, record));
    job.checkpoints.Recover(std::move(record));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> DecisionReplay::Cluster::PutIn(const JobId& id, const LoggedRows& rows,
                                                    const States& states, absl::Time now) {
  std::optional<v1::SpecRow> fixed;
  std::optional<v1::StateRow> state;
  RETURN_IF_ERROR(ReadRow(rows, Table::kSpecs, id.value(), fixed));
  if (const auto other = states.find(id); other != states.end()) {
    state = other->second;
  } else {
    RETURN_IF_ERROR(ReadRow(rows, Table::kStates, id.value(), state));
  }
  if (!fixed.has_value() && !state.has_value()) return true;  // it is forgotten
  if (!fixed.has_value() || !state.has_value()) return false;
  JobEntry job;
  job.fixed = *std::move(fixed);
  job.state = *std::move(state);
  if (!job.live()) return true;
  Part& part = parts_[id];
  part.epoch = job.epoch();
  for (const v1::KeptSlot& slot : job.state.kept()) {
    workers_.Keep(WorkerId(slot.worker()), slot.device(), id, spec::ShareOf(job.spec()));
    part.kept.push_back(slot);
  }
  if (!part.kept.empty()) scheduling_.Keep(id, KeptFor(job));
  if (!job.has_attempt()) {
    // A task of an array has entered its queue when its turn has come.
    const bool admitted = !job.spec().has_array_task() || job.state.has_queued();
    const bool waits =
        admitted && job.state.after().empty() && job.state.state() != v1::JOB_STATE_HELD;
    if (waits) scheduling_.Add(AsWaiting(job, reservations_));
    return true;
  }
  RETURN_IF_ERROR(ReadAttempt(rows, job, now));
  if (job.size() == 0) return false;
  const int32_t share = spec::ShareOf(job.spec());
  for (const v1::Placement& placement : job.attempt.placements()) {
    if (IsGone(job.gang.state(placement.rank())) && !job.up()) continue;
    const WorkerEntry* worker = workers_.Find(WorkerId(placement.worker()));
    if (worker == nullptr || worker->HeldOf(placement.device()) + share > kWholeDevice) {
      return false;
    }
    workers_.Hold(placement, id, part.epoch, share);
    part.held.push_back(placement);
  }
  for (const v1::Placement& placement : job.attempt.leaving()) {
    const WorkerEntry* worker = workers_.Find(WorkerId(placement.worker()));
    if (worker == nullptr || worker->HeldOf(placement.device()) + share > kWholeDevice) {
      return false;
    }
    workers_.Hold(placement, id, part.epoch, share);
    part.held.push_back(placement);
  }
  scheduling_.RecoverRunning(id, AsRunning(job, reservations_));
  return true;
}

absl::Status DecisionReplay::Cluster::SetPolicy(const LoggedRows& rows, absl::Time now) {
  std::optional<v1::QueuePolicy> policy;
  RETURN_IF_ERROR(ReadRow(rows, Table::kQueues, schema::kQueuePolicy, policy));
  if (!policy.has_value()) return absl::OkStatus();
  absl::StatusOr<QueueTree> tree = QueueTree::Make(*policy);
  if (!tree.ok()) {
    return absl::DataLossError(absl::StrCat("the stored queues: ", tree.status().message()));
  }
  scheduling_.SetTree(*std::move(tree), now);
  return absl::OkStatus();
}

std::vector<Decision> DecisionReplay::Cluster::Plan(const v1::PlanRecord& record,
                                                    const Usage& usage, absl::Time now) {
  const std::set<std::string> away(record.away().begin(), record.away().end());
  const std::set<std::string> undivided(record.undivided().begin(), record.undivided().end());
  for (auto& [id, worker] : workers_.entries()) {
    if (worker.shares_devices == undivided.contains(id.value())) {
      worker.shares_devices = !worker.shares_devices;
      workers_.Refresh(worker);
    }
    const bool is_away = away.contains(id.value());
    if (is_away == !worker.session.has_value()) continue;
    is_away ? workers_.CloseSession(worker) : Connect(worker);
  }
  QueueHistory history;
  for (const auto& [queue, used] : usage) {
    if (used.has_value()) history.Restore(queue, *used);
  }
  scheduling_.SetHistory(std::move(history));
  return scheduling_.MakePlan(now).decisions;
}

DecisionReplay::DecisionReplay() = default;
DecisionReplay::~DecisionReplay() = default;

absl::Status DecisionReplay::Begin(Store& base, const LoggedRows& rows) {
  ASSIGN_OR_RETURN(const std::optional<std::string> stored,
                   base.Get(Table::kMeta, schema::kPlanConditions));
  if (stored.has_value()) {
    v1::PlanConditions conditions;
    RETURN_IF_ERROR(schema::Parse(Table::kMeta, schema::kPlanConditions, *stored, conditions));
    RETURN_IF_ERROR(SetConditions(conditions, rows));
  }
  absl::Status status;
  const std::string prefix = schema::kQueueUsagePrefix;
  RETURN_IF_ERROR(
      base.Scan(Table::kMeta, prefix, "", [&](const std::string& key, const std::string& value) {
        if (!absl::StartsWith(key, prefix)) return false;
        v1::QueueUsage used;
        status = schema::Parse(Table::kMeta, key, value, used);
        if (status.ok()) usage_[key.substr(prefix.size())] = std::move(used);
        return status.ok();
      }));
  return status;
}

absl::Status DecisionReplay::SetConditions(const v1::PlanConditions& conditions,
                                           const LoggedRows& rows) {
  // Workers are in other domains: the cluster is built anew with the next plan.
  cluster_ = std::make_unique<Cluster>(RulesOf(conditions));
  policy_changed_ = true;
  for (const auto& [row, value] : rows) {
    if (row.first == Table::kSpecs) changed_jobs_.insert(JobId(row.second));
    if (row.first == Table::kWorkers) changed_workers_.insert(WorkerId(row.second));
  }
  return absl::OkStatus();
}

void DecisionReplay::Changed(const v1::RowChange& change) {
  const std::optional<Table> table = TableNamed(change.table());
  if (!table.has_value()) return;
  switch (*table) {
    case Table::kSpecs:
    case Table::kStates:
      changed_jobs_.insert(JobId(change.key()));
      break;
    case Table::kAttempts:
    case Table::kCheckpoints:
      // Ids of jobs have no such byte.
      changed_jobs_.insert(JobId(change.key().substr(0, change.key().find('\0'))));
      break;
    case Table::kWorkers:
      changed_workers_.insert(WorkerId(change.key()));
      break;
    case Table::kQueues:
      policy_changed_ = true;
      break;
    default:
      break;
  }
}

absl::Status DecisionReplay::Take(const v1::LogEntry& entry, const LoggedRows& rows) {
  for (const v1::RowChange& change : entry.changes()) Changed(change);
  for (const v1::QueueUsageChange& change : entry.queue_usage()) {
    std::optional<v1::QueueUsage>& used = usage_[change.queue()];
    used.reset();
    if (change.has_usage()) used = change.usage();
  }
  if (entry.has_conditions()) RETURN_IF_ERROR(SetConditions(entry.conditions(), rows));
  if (entry.plans().empty() && Starts(entry)) ++report_.not_comparable[kNoRecord];
  for (int plan = 0; plan < entry.plans_size(); ++plan) {
    const std::string& incomplete = entry.plans(plan).incomplete();
    if (!incomplete.empty()) {
      ++report_.not_comparable[incomplete];
    } else if (cluster_ == nullptr) {
      ++report_.not_comparable[kNoConditions];
    } else {
      RETURN_IF_ERROR(MakeAgain(entry, plan, rows));
    }
  }
  return absl::OkStatus();
}

absl::Status DecisionReplay::MakeAgain(const v1::LogEntry& entry, int plan,
                                       const LoggedRows& rows) {
  // What this plan and those behind it have changed was, for this one, as before the first of them.
  States states;
  Usage usage = usage_;
  std::set<std::string> before;
  for (int later = plan; later < entry.plans_size(); ++later) {
    for (const v1::RowChange& row : entry.plans(later).before()) {
      v1::StateRow state;
      RETURN_IF_ERROR(schema::Parse(Table::kStates, row.key(), row.value(), state));
      states.try_emplace(JobId(row.key()), std::move(state));
    }
    for (const v1::QueueUsageChange& change : entry.plans(later).usage_before()) {
      if (!before.insert(change.queue()).second) continue;
      std::optional<v1::QueueUsage>& used = usage[change.queue()];
      used.reset();
      if (change.has_usage()) used = change.usage();
    }
  }
  const absl::Time now = FromProto(entry.time());
  if (std::exchange(policy_changed_, false)) RETURN_IF_ERROR(cluster_->SetPolicy(rows, now));
  std::set<JobId> jobs = std::exchange(changed_jobs_, {});
  for (const auto& [id, state] : states) jobs.insert(id);
  ASSIGN_OR_RETURN(
      const bool sound,
      cluster_->Update(std::move(jobs), std::exchange(changed_workers_, {}), rows, states, now));
  for (const auto& [id, state] : states) changed_jobs_.insert(id);
  if (!sound) {
    ++report_.not_comparable[kContradiction];
    return absl::OkStatus();
  }
  std::vector<v1::PlanDecision> decided;
  for (const Decision& decision : cluster_->Plan(entry.plans(plan), usage, now)) {
    if (!ChangesState(decision)) continue;
    decided.push_back(RecordOf(decision));
    if (const Start* start = std::get_if<Start>(&decision)) {
      AddSlots({start->placements.begin(), start->placements.end()}, decided.back());
    }
  }
  Compare(entry, entry.plans(plan), decided);
  return absl::OkStatus();
}

void DecisionReplay::Compare(const v1::LogEntry& entry, const v1::PlanRecord& record,
                             const std::vector<v1::PlanDecision>& now) {
  ++report_.plans;
  std::map<std::string, uint64_t> epochs;  // before the plan, of the jobs that it decided about
  for (const v1::RowChange& row : record.before()) {
    v1::StateRow state;
    if (state.ParseFromString(row.value())) epochs[row.key()] = state.epoch();
  }
  std::vector<v1::PlanDecision> then(record.decisions().begin(), record.decisions().end());
  for (v1::PlanDecision& decision : then) {
    if (decision.kind() != v1::PLAN_DECISION_KIND_START) continue;
    // The attempt that the plan made is the first of the job behind those before it.
    const std::string last =
        schema::Encode(schema::JobKey{JobId(decision.job()), {epochs[decision.job()]}});
    for (const v1::RowChange& change : entry.changes()) {
      if (change.table() != Name(Table::kAttempts) || !change.has_value() || change.key() <= last ||
          !absl::StartsWith(change.key(), decision.job() + '\0')) {
        continue;
      }
      v1::AttemptRow attempt;
      if (attempt.ParseFromString(change.value())) AddSlots(attempt.placements(), decision);
      break;
    }
  }
  const ByJob stored = GroupByJob(then), made = GroupByJob(now);
  std::set<std::string> jobs;
  for (const auto& [job, decisions] : stored) jobs.insert(job);
  for (const auto& [job, decisions] : made) jobs.insert(job);
  bool differs = false;
  for (const std::string& job : jobs) {
    const auto of = [&job](const ByJob& all) {
      const auto found = all.find(job);
      return found == all.end() ? ByJob::mapped_type() : found->second;
    };
    if (Same(of(stored), of(made))) continue;
    differs = true;
    if (report_.differences.size() < kDecisionDifferencesMax) {
      report_.differences.push_back({entry.index(), job, Text(of(stored)), Text(of(made))});
    }
  }
  report_.different += differs ? 1 : 0;
}

}  // namespace muster::coordinator
