#include "coordinator/core/fleet.h"

#include <set>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "coordinator/core/reputation.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

// The workers that a request names.
template <typename Request>
std::vector<std::string> WorkersOf(const Request& request) {
  return {request.workers().begin(), request.workers().end()};
}
std::vector<std::string> WorkersOf(const v1::ReserveRequest& request) {
  std::vector<std::string> names;
  for (const v1::ReservedDevices& one : request.workers()) names.push_back(one.worker());
  return names;
}
std::vector<std::string> WorkersOf(const v1::UnreserveRequest&) { return {}; }

absl::Status CheckReason(const std::string& reason) {
  if (reason.size() <= kCordonReasonBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("reason: ", reason.size(), " bytes; at most ", kCordonReasonBytesMax));
}

}  // namespace

ReplyAction Fleet::Carry(const FleetEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status =
      std::visit([&](const auto& request) { return Carry(request, event, turn); }, event.request);
  if (reply.status.ok()) {
    life_.EndReleasedAttempts(turn);
    const std::vector<std::string> names =
        std::visit([](const auto& request) { return WorkersOf(request); }, event.request);
    for (const std::string& name : std::set<std::string>(names.begin(), names.end())) {
      reply.workers.push_back(ViewOf(*workers_.Find(WorkerId(name))));
    }
  }
  return reply;
}

absl::Status Fleet::Carry(const v1::CordonRequest& request, const FleetEvent& event, Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  RETURN_IF_ERROR(CheckReason(request.reason()));
  for (const std::string& name : request.workers()) {
    Maintenance::Cordon(*workers_.Find(WorkerId(name)), {event.caller.actor, request.reason()},
                        workers_, turn);
  }
  return absl::OkStatus();
}

absl::Status Fleet::Carry(const v1::UncordonRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  for (const std::string& name : request.workers()) {
    maintenance_.Uncordon(*workers_.Find(WorkerId(name)), workers_, deadlines_, turn);
  }
  return absl::OkStatus();
}

absl::Status Fleet::Carry(const v1::ForgiveRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  for (const std::string& name : request.workers()) {
    reputation::Forgive(*workers_.Find(WorkerId(name)), workers_, deadlines_, turn);
  }
  return absl::OkStatus();
}

absl::Status Fleet::Carry(const v1::DrainRequest& request, const FleetEvent& event, Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  RETURN_IF_ERROR(CheckReason(request.reason()));
  const absl::Duration timeout =
      request.has_timeout() ? FromProto(request.timeout()) : kDrainTimeout;
  if (timeout < absl::ZeroDuration() || timeout > kDrainTimeoutMax) {
    return absl::InvalidArgumentError(absl::StrCat("timeout: ", absl::FormatDuration(timeout),
                                                   " is out of range; 0 to ",
                                                   absl::FormatDuration(kDrainTimeoutMax)));
  }
  const Maintenance::Order order{event.caller.actor, request.reason()};
  std::vector<WorkerEntry*> drained;
  for (const std::string& name : request.workers()) {
    WorkerEntry& worker = *workers_.Find(WorkerId(name));
    if (maintenance_.Drain(worker, timeout, order, workers_, turn)) drained.push_back(&worker);
  }
  // None of them takes what another one loses.
  for (WorkerEntry* worker : drained) CheckDrain(*worker, turn);
  return absl::OkStatus();
}

void Fleet::CheckDrain(WorkerEntry& worker, Turn& turn) {
  for (const Maintenance::Move& move : maintenance_.Check(worker, jobs_, deadlines_, turn)) {
    attempts_.ReplaceOrStop(*jobs_.Find(move.job), worker.row.name(),
                            {v1::CAUSE_MAINTENANCE, move.why}, Departure::kToBeProven, turn);
  }
}

absl::Status Fleet::Carry(const v1::ReserveRequest& request, const FleetEvent&, Turn& turn) {
  if (const std::string& queue = request.reservation().queue(); !queue.empty()) {
    // One that no job can wait in would keep the devices for nobody.
    RETURN_IF_ERROR(scheduling_.tree().CheckJob(queue, v1::DEVICE_KIND_CPU, /*ranks=*/0));
  }
  RETURN_IF_ERROR(reservations_.Reserve(request, workers_, deadlines_, turn));
  states_.ReservationsChanged(turn);
  return absl::OkStatus();
}

absl::Status Fleet::Carry(const v1::UnreserveRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(reservations_.End(request.name(), workers_, deadlines_, turn));
  states_.ReservationsChanged(turn);
  return absl::OkStatus();
}

absl::Status Fleet::Remove(const RemoveWorkerEvent& event, Turn& turn) {
  WorkerEntry* worker = workers_.Find(WorkerId(event.worker));
  if (worker == nullptr) {
    return absl::NotFoundError(absl::StrCat("no worker has the name ", spec::Quoted(event.worker),
                                            "; `muster get workers` lists them"));
  }
  const std::string why = absl::StrCat("worker ", event.worker, " was removed by an operator");
  if (worker->row.state() != v1::WORKER_STATE_LOST) worker_life_.Lose(*worker, why, turn);
  life_.EndReleasedAttempts(turn);  // nothing may be held by a worker that is forgotten
  worker_life_.Forget(*worker, why, turn);
  reservations_.Refresh(workers_, deadlines_);
  states_.ReservationsChanged(turn);
  return absl::OkStatus();
}

void Fleet::Recover(absl::Time now) {
  maintenance_.Recover(workers_, deadlines_, now);
  for (const auto& [id, worker] : workers_.entries()) {
    reputation::Recover(worker, scheduling_.tree(), deadlines_);
  }
  reservations_.Refresh(workers_, deadlines_);
}

void Fleet::ReviewReputation(WorkerEntry& worker, Turn& turn) {
  reputation::Review(worker, scheduling_.tree(), workers_, deadlines_, turn);
}

void Fleet::ExpireReservations(Turn& turn) {
  reservations_.Expire(workers_, deadlines_, turn);
  states_.ReservationsChanged(turn);
}

void Fleet::AfterCheckpoint(JobEntry& job, Turn& turn) {
  if (const auto move = maintenance_.AfterCheckpoint(job); move.has_value()) {
    attempts_.Stop(job, {v1::CAUSE_MAINTENANCE, move->why}, turn);
  }
}

v1::Worker Fleet::ViewOf(const WorkerEntry& worker) const {
  v1::Worker row = worker.row;
  row.clear_identity();
  *row.mutable_last_heard() = ToProto(worker.last_heard);
  row.set_slots(row.devices_size());
  int free = 0;
  int64_t used = 0;
  for (v1::Device& device : *row.mutable_devices()) {
    const int32_t thousandths = worker.HeldOf(device.name());
    if (worker.Ready() && device.unusable().empty() && thousandths == 0) ++free;
    used += thousandths;
    device.set_used(static_cast<double>(thousandths) / kWholeDevice);
    device.clear_jobs();
    if (thousandths == 0) continue;
    std::set<std::string> jobs;
    for (const SlotHolder& holder : worker.held.at(device.name())) {
      jobs.insert(jobs_.Find(holder.job)->name());
    }
    for (const std::string& job : jobs) device.add_jobs(job);
  }
  row.set_slots_free(free);
  row.set_slots_used(static_cast<double>(used) / kWholeDevice);
  std::set<std::string> names;
  for (const JobId& job : worker.Jobs()) names.insert(jobs_.Find(job)->name());
  for (const std::string& name : names) row.add_jobs(name);
  const DomainPath path = workers_.topology().PathOf(worker.row);
  for (size_t depth = kDomainLevels.size(); depth-- > 0;) {
    if (path.names[depth].empty()) continue;
    v1::TopologyDomain& domain = *row.add_domains();
    domain.set_level(kDomainLevels[depth]);
    domain.set_name(path.names[depth]);
  }
  return row;
}

}  // namespace muster::coordinator
