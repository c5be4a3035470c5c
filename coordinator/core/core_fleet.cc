#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr size_t kReservationNameMax = 63;
const DeadlineKey kReservationsDue = {DeadlineKey::Kind::kReservations, ""};

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

std::string Because(const std::string& reason) {
  return reason.empty() ? "" : absl::StrCat(": ", reason);
}

absl::Status CheckReason(const std::string& reason) {
  if (reason.size() <= kCordonReasonBytesMax) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("reason: ", reason.size(), " bytes; at most ", kCordonReasonBytesMax));
}

bool IsReservationName(const std::string& name) {
  return !name.empty() && name.size() <= kReservationNameMax &&
         std::all_of(name.begin(), name.end(), [](char c) {
           return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-';
         });
}

// "team" and "vision" of "team=vision"; the name is empty when there is no '='.
std::pair<std::string, std::string> LabelParts(const std::string& label) {
  const size_t cut = label.find('=');
  if (cut == std::string::npos) return {};
  return {label.substr(0, cut), label.substr(cut + 1)};
}

absl::Status CheckReservation(const v1::Reservation& reservation, absl::Time now) {
  if (!IsReservationName(reservation.name())) {
    return absl::InvalidArgumentError(
        absl::StrCat("name: ", spec::Quoted(reservation.name()),
                     " is no name of a reservation: 1-63 characters of [a-z0-9-]"));
  }
  if (reservation.queue().empty() == reservation.label().empty()) {
    return absl::InvalidArgumentError(
        "one of queue and label is required: the jobs that get the devices");
  }
  if (!reservation.label().empty() && LabelParts(reservation.label()).first.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("label: ", spec::Quoted(reservation.label()),
                                                   " is not NAME=VALUE of a label of jobs"));
  }
  for (const std::string& text : {reservation.owner(), reservation.queue(), reservation.label()}) {
    if (text.size() > kWorkerNameBytesMax) {
      return absl::InvalidArgumentError(absl::StrCat("owner, queue and label: ", text.size(),
                                                     " bytes; at most ", kWorkerNameBytesMax));
    }
  }
  const absl::Time until = FromProto(reservation.until());
  if (!reservation.has_until() || until <= now || until > now + kReservationMax) {
    return absl::InvalidArgumentError(absl::StrCat("until: must be in the future, at most ",
                                                   absl::FormatDuration(kReservationMax)));
  }
  return absl::OkStatus();
}

std::string ForWhom(const v1::Reservation& reservation) {
  return reservation.queue().empty() ? absl::StrCat("jobs with the label ", reservation.label())
                                     : absl::StrCat("jobs of queue ", reservation.queue());
}

v1::Reservation* FindReservation(v1::Worker& row, const std::string& name) {
  for (v1::Reservation& reservation : *row.mutable_reservations()) {
    if (reservation.name() == name) return &reservation;
  }
  return nullptr;
}

}  // namespace

absl::Status CoreImpl::CheckWorkers(const std::vector<std::string>& names) const {
  if (names.empty()) return absl::InvalidArgumentError("workers: at least one is required");
  if (names.size() > kWorkersMax) {
    return absl::InvalidArgumentError(
        absl::StrCat("workers: ", names.size(), " names; at most ", kWorkersMax));
  }
  for (const std::string& name : names) {
    if (workers_.Find(WorkerId(name)) == nullptr) {
      return absl::NotFoundError(absl::StrCat("no worker has the name ", spec::Quoted(name),
                                              "; `muster get workers` lists them"));
    }
  }
  return absl::OkStatus();
}

void CoreImpl::On(const FleetEvent& event, Turn& turn) {
  ReplyAction reply;
  reply.call = event.call;
  reply.status =
      std::visit([&](const auto& request) { return Carry(request, event, turn); }, event.request);
  if (reply.status.ok()) {
    EndReleasedAttempts(turn);
    const std::vector<std::string> names =
        std::visit([](const auto& request) { return WorkersOf(request); }, event.request);
    for (const std::string& name : std::set<std::string>(names.begin(), names.end())) {
      reply.workers.push_back(ViewOf(*workers_.Find(WorkerId(name))));
    }
  }
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::Carry(const v1::CordonRequest& request, const FleetEvent& event,
                             Turn& turn) {
  RETURN_IF_ERROR(CheckWorkers(WorkersOf(request)));
  RETURN_IF_ERROR(CheckReason(request.reason()));
  for (const std::string& name : request.workers()) {
    WorkerEntry& worker = *workers_.Find(WorkerId(name));
    if (worker.row.has_cordon()) continue;  // drained ones stay so
    v1::Cordon& cordon = *worker.row.mutable_cordon();
    *cordon.mutable_since() = ToProto(turn.now());
    cordon.set_actor(event.caller.actor);
    cordon.set_reason(request.reason());
    workers_.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(name, v1::EVENT_KIND_WORKER_CORDONED,
                         absl::StrCat("worker ", name, " was cordoned and gets no new ranks",
                                      Because(request.reason()))));
    turn.Reschedule();
  }
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::UncordonRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(CheckWorkers(WorkersOf(request)));
  for (const std::string& name : request.workers()) {
    WorkerEntry& worker = *workers_.Find(WorkerId(name));
    if (!worker.row.has_cordon()) continue;
    worker.row.clear_cordon();
    draining_.erase(worker.id());
    deadlines_.Clear({DeadlineKey::Kind::kDrain, name});
    workers_.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(name, v1::EVENT_KIND_WORKER_UNCORDONED,
                         absl::StrCat("worker ", name, " gets new ranks again")));
    turn.Reschedule();
  }
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::DrainRequest& request, const FleetEvent& event, Turn& turn) {
  RETURN_IF_ERROR(CheckWorkers(WorkersOf(request)));
  RETURN_IF_ERROR(CheckReason(request.reason()));
  const absl::Duration timeout =
      request.has_timeout() ? FromProto(request.timeout()) : kDrainTimeout;
  if (timeout < absl::ZeroDuration() || timeout > kDrainTimeoutMax) {
    return absl::InvalidArgumentError(absl::StrCat("timeout: ", absl::FormatDuration(timeout),
                                                   " is out of range; 0 to ",
                                                   absl::FormatDuration(kDrainTimeoutMax)));
  }
  for (const std::string& name : request.workers()) {
    WorkerEntry& worker = *workers_.Find(WorkerId(name));
    v1::Cordon& cordon = *worker.row.mutable_cordon();
    const absl::Time until = turn.now() + timeout;
    // A repeated request may only bring the end nearer.
    if (cordon.drain() && (cordon.drained() || FromProto(cordon.until()) <= until)) continue;
    const bool again = cordon.drain();
    if (!again) {
      *cordon.mutable_since() = ToProto(turn.now());
      cordon.set_actor(event.caller.actor);
      cordon.set_reason(request.reason());
      cordon.set_drain(true);
    }
    *cordon.mutable_until() = ToProto(until);
    draining_.insert(worker.id());
    workers_.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(
        name, v1::EVENT_KIND_WORKER_DRAINING,
        absl::StrCat("worker ", name, " is drained: its jobs move after their next checkpoint, at ",
                     "the latest in ", absl::FormatDuration(timeout), Because(request.reason()))));
    turn.Reschedule();
    CheckDrain(worker, turn);
  }
  return absl::OkStatus();
}

void CoreImpl::CheckDrain(WorkerEntry& worker, Turn& turn) {
  const std::string& name = worker.row.name();
  if (!worker.row.cordon().drain() || worker.row.cordon().drained()) {
    draining_.erase(worker.id());
    return;
  }
  const absl::Time until = FromProto(worker.row.cordon().until());
  for (const JobId& id : worker.Jobs()) {
    JobEntry& job = *jobs_.Find(id);
    if (!job.up()) continue;
    const bool trains = job.state.attempt_state() == v1::ATTEMPT_STATE_TRAINING;
    if (trains && turn.now() < until) continue;
    Stop(job,
         {v1::CAUSE_MAINTENANCE,
          trains
              ? absl::StrCat("worker ", name, " is drained, and the time for a checkpoint is over")
              : absl::StrCat("worker ", name, " is drained before the job trains")},
         turn);
  }
  if (!worker.held.empty()) {
    deadlines_.Set({DeadlineKey::Kind::kDrain, name},
                   turn.now() < until ? until : absl::InfiniteFuture());
    return;
  }
  worker.row.mutable_cordon()->set_drained(true);
  draining_.erase(worker.id());
  deadlines_.Clear({DeadlineKey::Kind::kDrain, name});
  WorkerTable::Persist(worker, turn);
  turn.Log(AboutWorker(name, v1::EVENT_KIND_WORKER_DRAINED,
                       absl::StrCat("worker ", name, " is drained: it has no ranks")));
}

void CoreImpl::MoveIfDrained(JobEntry& job, Turn& turn) {
  if (draining_.empty() || !job.up() || job.state.last_committed_step() >= job.steps()) return;
  for (const auto& [name, ranks] : job.gang.by_worker()) {
    if (!draining_.contains(WorkerId(name))) continue;
    return Stop(job,
                {v1::CAUSE_MAINTENANCE,
                 absl::StrCat("worker ", name, " is drained; the job goes on from step ",
                              job.state.last_committed_step(), " elsewhere")},
                turn);
  }
}

// ---- reservations -------------------------------------------------------------------------------

absl::Status CoreImpl::Carry(const v1::ReserveRequest& request, const FleetEvent&, Turn& turn) {
  v1::Reservation reservation = request.reservation();
  reservation.clear_devices();
  RETURN_IF_ERROR(CheckReservation(reservation, turn.now()));
  const std::vector<std::string> names = WorkersOf(request);
  RETURN_IF_ERROR(CheckWorkers(names));
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size()) {
    return absl::InvalidArgumentError("workers: one is named twice");
  }
  if (reservations_.size() >= kReservationsMax && !reservations_.contains(reservation.name())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the cluster has ", reservations_.size(), " reservations, as many as may be"));
  }
  for (const v1::ReservedDevices& one : request.workers()) {
    const v1::Worker& row = workers_.Find(WorkerId(one.worker()))->row;
    std::set<std::string> wanted;
    for (const v1::Device& device : row.devices()) {
      if (one.devices().empty()) wanted.insert(device.name());
    }
    for (const std::string& device : one.devices()) {
      const bool known = std::any_of(row.devices().begin(), row.devices().end(),
                                     [&](const v1::Device& d) { return d.name() == device; });
      if (!known) {
        return absl::InvalidArgumentError(absl::StrCat("devices: worker ", one.worker(),
                                                       " has no device ", spec::Quoted(device)));
      }
      wanted.insert(device);
    }
    for (const v1::Reservation& other : row.reservations()) {
      if (other.name() == reservation.name()) continue;
      for (const std::string& device : wanted) {
        if (!Covers(other, device)) continue;
        return absl::FailedPreconditionError(absl::StrCat(
            "device ", device, " of worker ", one.worker(), " is reserved by ", other.name(),
            "; end that with `muster reserve --end ", other.name(), "`"));
      }
    }
  }
  EndReservation(reservation.name(), "replaced", turn);
  for (const v1::ReservedDevices& one : request.workers()) {
    WorkerEntry& worker = *workers_.Find(WorkerId(one.worker()));
    v1::Reservation& added = *worker.row.add_reservations();
    added = reservation;
    *added.mutable_devices() = one.devices();
    std::sort(
        worker.row.mutable_reservations()->begin(), worker.row.mutable_reservations()->end(),
        [](const v1::Reservation& a, const v1::Reservation& b) { return a.name() < b.name(); });
    workers_.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(
        one.worker(), v1::EVENT_KIND_DEVICES_RESERVED,
        absl::StrCat("reservation ", reservation.name(), ": ",
                     one.devices().empty() ? "all devices" : absl::StrJoin(one.devices(), ", "),
                     " of worker ", one.worker(), " are for ", ForWhom(reservation), " until ",
                     absl::FormatTime(FromProto(reservation.until()), absl::UTCTimeZone()))));
  }
  ReservationsChanged(turn);
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::UnreserveRequest& request, const FleetEvent&, Turn& turn) {
  if (!reservations_.contains(request.name())) {
    return absl::NotFoundError(absl::StrCat("there is no reservation ",
                                            spec::Quoted(request.name()),
                                            "; `muster get reservations` lists them"));
  }
  EndReservation(request.name(), "ended by an operator", turn);
  ReservationsChanged(turn);
  return absl::OkStatus();
}

std::vector<std::string> CoreImpl::EndReservation(const std::string& name, const std::string& why,
                                                  Turn& turn) {
  std::vector<std::string> changed;
  for (auto& [id, worker] : workers_.entries()) {
    if (FindReservation(worker.row, name) == nullptr) continue;
    auto* all = worker.row.mutable_reservations();
    all->erase(std::remove_if(all->begin(), all->end(),
                              [&](const v1::Reservation& r) { return r.name() == name; }),
               all->end());
    workers_.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(id.value(), v1::EVENT_KIND_RESERVATION_ENDED,
                         absl::StrCat("reservation ", name, " of devices of worker ", id.value(),
                                      " has ended: ", why)));
    changed.push_back(id.value());
  }
  return changed;
}

void CoreImpl::CheckReservations(Turn& turn) {
  std::vector<std::string> over;
  for (const auto& [name, reservation] : reservations_) {
    if (FromProto(reservation.until()) <= turn.now()) over.push_back(name);
  }
  for (const std::string& name : over) EndReservation(name, "it has expired", turn);
  ReservationsChanged(turn);
}

void CoreImpl::ReservationsChanged(Turn& turn) {
  reservations_.clear();
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [id, worker] : workers_.entries()) {
    for (const v1::Reservation& reservation : worker.row.reservations()) {
      v1::Reservation& known = reservations_[reservation.name()];
      known = reservation;
      known.clear_devices();
      next = std::min(next, FromProto(reservation.until()));
    }
  }
  deadlines_.Set(kReservationsDue, next);
  for (const auto& live : jobs_.live()) {
    const JobId& id = live.second;
    scheduling_.ChangeRunning(id, [&](RunningJob& running) {
      if (running.elastic != nullptr) running.elastic = ElasticityOf(*jobs_.Find(id));
    });
    if (!scheduling_.Waits(id)) continue;
    scheduling_.Remove(id);
    scheduling_.Add(AsWaiting(*jobs_.Find(id)));
  }
  turn.Reschedule();
}

std::vector<std::string> CoreImpl::ReservationsFor(const v1::JobSpec& spec) const {
  std::vector<std::string> names;
  for (const auto& [name, reservation] : reservations_) {
    if (reservation.label().empty()) {
      if (reservation.queue() == spec.queue()) names.push_back(name);
      continue;
    }
    const auto [label, value] = LabelParts(reservation.label());
    const auto found = spec.labels().find(label);
    if (found != spec.labels().end() && found->second == value) names.push_back(name);
  }
  return names;
}

void CoreImpl::RecoverFleet(Turn& turn) {
  for (auto& [id, worker] : workers_.entries()) {
    if (!worker.row.cordon().drain() || worker.row.cordon().drained()) continue;
    draining_.insert(id);
    deadlines_.Set({DeadlineKey::Kind::kDrain, id.value()}, turn.now());
  }
  ReservationsChanged(turn);
}

}  // namespace muster::coordinator
