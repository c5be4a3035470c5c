#include "coordinator/core/maintenance.h"

#include "absl/strings/str_cat.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

DeadlineKey DeadlineOf(const WorkerEntry& worker) {
  return {DeadlineKey::Kind::kDrain, worker.row.name()};
}

std::string Because(const std::string& reason) {
  return reason.empty() ? "" : absl::StrCat(": ", reason);
}

bool IsDraining(const WorkerEntry& worker) {
  return worker.row.cordon().drain() && !worker.row.cordon().drained();
}

void Begin(v1::Cordon& cordon, const Maintenance::Order& order, absl::Time now) {
  *cordon.mutable_since() = ToProto(now);
  cordon.set_actor(order.actor);
  cordon.set_reason(order.reason);
}

// The worker takes other ranks than before.
void Changed(const WorkerEntry& worker, WorkerTable& workers, Turn& turn, v1::EventKind kind,
             std::string message) {
  workers.Refresh(worker);
  WorkerTable::Persist(worker, turn);
  turn.Log(AboutWorker(worker.row.name(), kind, std::move(message)));
  turn.Reschedule();
}

}  // namespace

void Maintenance::Recover(const WorkerTable& workers, Deadlines& deadlines, absl::Time now) {
  for (const auto& [id, worker] : workers.entries()) {
    if (!IsDraining(worker)) continue;
    draining_.insert(id);
    deadlines.Set(DeadlineOf(worker), now);
  }
}

void Maintenance::Cordon(WorkerEntry& worker, const Order& order, WorkerTable& workers,
                         Turn& turn) {
  if (worker.row.has_cordon()) return;
  Begin(*worker.row.mutable_cordon(), order, turn.now());
  Changed(worker, workers, turn, v1::EVENT_KIND_WORKER_CORDONED,
          absl::StrCat("worker ", worker.row.name(), " was cordoned and gets no new ranks",
                       Because(order.reason)));
}

void Maintenance::Uncordon(WorkerEntry& worker, WorkerTable& workers, Deadlines& deadlines,
                           Turn& turn) {
  if (!worker.row.has_cordon()) return;
  worker.row.clear_cordon();
  draining_.erase(worker.id());
  deadlines.Clear(DeadlineOf(worker));
  Changed(worker, workers, turn, v1::EVENT_KIND_WORKER_UNCORDONED,
          absl::StrCat("worker ", worker.row.name(), " gets new ranks again"));
}

bool Maintenance::Drain(WorkerEntry& worker, absl::Duration timeout, const Order& order,
                        WorkerTable& workers, Turn& turn) {
  v1::Cordon& cordon = *worker.row.mutable_cordon();
  const absl::Time until = turn.now() + timeout;
  if (cordon.drain() && (cordon.drained() || FromProto(cordon.until()) <= until)) return false;
  if (!cordon.drain()) {
    Begin(cordon, order, turn.now());
    cordon.set_drain(true);
  }
  *cordon.mutable_until() = ToProto(until);
  draining_.insert(worker.id());
  Changed(worker, workers, turn, v1::EVENT_KIND_WORKER_DRAINING,
          absl::StrCat("worker ", worker.row.name(),
                       " is drained: its jobs move after their next checkpoint, at the latest in ",
                       absl::FormatDuration(timeout), Because(order.reason)));
  return true;
}

std::vector<Maintenance::Move> Maintenance::Check(WorkerEntry& worker, const JobTable& jobs,
                                                  Deadlines& deadlines, Turn& turn) {
  std::vector<Move> moves;
  if (!IsDraining(worker)) {
    draining_.erase(worker.id());
    return moves;
  }
  if (worker.held.empty()) {
    Drained(worker, deadlines, turn);
    return moves;
  }
  const std::string& name = worker.row.name();
  const absl::Time until = FromProto(worker.row.cordon().until());
  for (const JobId& id : worker.Jobs()) {
    const JobEntry& job = *jobs.Find(id);
    if (!job.up() || job.Leaves(name)) continue;
    const bool trains = job.state.attempt_state() == v1::ATTEMPT_STATE_TRAINING;
    if (trains && turn.now() < until) continue;
    moves.push_back({id, trains
                             ? absl::StrCat("worker ", name,
                                            " is drained, and the time for a checkpoint is over")
                             : absl::StrCat("worker ", name, " is drained before the job trains")});
  }
  deadlines.Set(DeadlineOf(worker), turn.now() < until ? until : absl::InfiniteFuture());
  return moves;
}

void Maintenance::Drained(WorkerEntry& worker, Deadlines& deadlines, Turn& turn) {
  worker.row.mutable_cordon()->set_drained(true);
  draining_.erase(worker.id());
  deadlines.Clear(DeadlineOf(worker));
  WorkerTable::Persist(worker, turn);
  turn.Log(AboutWorker(worker.row.name(), v1::EVENT_KIND_WORKER_DRAINED,
                       absl::StrCat("worker ", worker.row.name(), " is drained: it has no ranks")));
}

void Maintenance::NoteDrained(WorkerTable& workers, Deadlines& deadlines, Turn& turn) {
  const std::set<WorkerId> draining = draining_;
  for (const WorkerId& id : draining) {
    WorkerEntry* worker = workers.Find(id);
    if (worker == nullptr || !IsDraining(*worker)) {
      draining_.erase(id);
    } else if (worker->held.empty()) {
      Drained(*worker, deadlines, turn);
    }
  }
}

std::optional<Maintenance::Move> Maintenance::AfterCheckpoint(const JobEntry& job) const {
  if (draining_.empty() || !job.up() || job.state.last_committed_step() >= job.steps()) {
    return std::nullopt;
  }
  for (const auto& [name, ranks] : job.gang.by_worker()) {
    if (!draining_.contains(WorkerId(name))) continue;
    return Move{job.id(), absl::StrCat("worker ", name, " is drained; the job goes on from step ",
                                       job.state.last_committed_step(), " elsewhere")};
  }
  return std::nullopt;
}

}  // namespace muster::coordinator
