#include "coordinator/core/reservations.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "coordinator/core/limits.h"
#include "proto/spec/names.h"
#include "proto/time.h"

namespace muster::coordinator {
namespace {

constexpr size_t kReservationNameMax = 63;
const DeadlineKey kDue = {DeadlineKey::Kind::kReservations, ""};

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
  if (reservation.queue().empty() && reservation.label().empty()) {
    return absl::InvalidArgumentError(
        "one of queue and label is required: the jobs that get the devices");
  }
  if (!reservation.queue().empty() && !reservation.label().empty()) {
    return absl::InvalidArgumentError("queue, label: keep one of both");
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

// Takes the reservation from the workers that have it.
void Remove(const std::string& name, const std::string& why, WorkerTable& workers, Turn& turn) {
  for (auto& [id, worker] : workers.entries()) {
    if (FindReservation(worker.row, name) == nullptr) continue;
    auto* all = worker.row.mutable_reservations();
    all->erase(std::remove_if(all->begin(), all->end(),
                              [&](const v1::Reservation& r) { return r.name() == name; }),
               all->end());
    workers.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(id.value(), v1::EVENT_KIND_RESERVATION_ENDED,
                         absl::StrCat("reservation ", name, " of devices of worker ", id.value(),
                                      " has ended: ", why)));
  }
}

}  // namespace

absl::Status Reservations::Check(const v1::ReserveRequest& request, const WorkerTable& workers,
                                 absl::Time now) const {
  const v1::Reservation& reservation = request.reservation();
  RETURN_IF_ERROR(CheckReservation(reservation, now));
  std::vector<std::string> names;
  for (const v1::ReservedDevices& one : request.workers()) names.push_back(one.worker());
  RETURN_IF_ERROR(workers.CheckKnown(names));
  if (std::set<std::string>(names.begin(), names.end()).size() != names.size()) {
    return absl::InvalidArgumentError("workers: one is named twice");
  }
  if (by_name_.size() >= kReservationsMax && !by_name_.contains(reservation.name())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the cluster has ", by_name_.size(), " reservations, as many as may be"));
  }
  for (const v1::ReservedDevices& one : request.workers()) {
    const v1::Worker& row = workers.Find(WorkerId(one.worker()))->row;
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
  return absl::OkStatus();
}

absl::Status Reservations::Reserve(const v1::ReserveRequest& request, WorkerTable& workers,
                                   Deadlines& deadlines, Turn& turn) {
  RETURN_IF_ERROR(Check(request, workers, turn.now()));
  v1::Reservation reservation = request.reservation();
  reservation.clear_devices();
  Remove(reservation.name(), "replaced", workers, turn);
  for (const v1::ReservedDevices& one : request.workers()) {
    WorkerEntry& worker = *workers.Find(WorkerId(one.worker()));
    v1::Reservation& added = *worker.row.add_reservations();
    added = reservation;
    *added.mutable_devices() = one.devices();
    std::sort(
        worker.row.mutable_reservations()->begin(), worker.row.mutable_reservations()->end(),
        [](const v1::Reservation& a, const v1::Reservation& b) { return a.name() < b.name(); });
    workers.Refresh(worker);
    WorkerTable::Persist(worker, turn);
    turn.Log(AboutWorker(
        one.worker(), v1::EVENT_KIND_DEVICES_RESERVED,
        absl::StrCat("reservation ", reservation.name(), ": ",
                     one.devices().empty() ? "all devices" : absl::StrJoin(one.devices(), ", "),
                     " of worker ", one.worker(), " are for ", ForWhom(reservation), " until ",
                     absl::FormatTime(FromProto(reservation.until()), absl::UTCTimeZone()))));
  }
  Refresh(workers, deadlines);
  return absl::OkStatus();
}

absl::Status Reservations::End(const std::string& name, WorkerTable& workers, Deadlines& deadlines,
                               Turn& turn) {
  if (!by_name_.contains(name)) {
    return absl::NotFoundError(absl::StrCat("there is no reservation ", spec::Quoted(name),
                                            "; `muster get reservations` lists them"));
  }
  Remove(name, "ended by an operator", workers, turn);
  Refresh(workers, deadlines);
  return absl::OkStatus();
}

void Reservations::Expire(WorkerTable& workers, Deadlines& deadlines, Turn& turn) {
  for (const auto& [name, reservation] : by_name_) {
    if (FromProto(reservation.until()) > turn.now()) continue;
    Remove(name, "it has expired", workers, turn);
  }
  Refresh(workers, deadlines);
}

void Reservations::Refresh(const WorkerTable& workers, Deadlines& deadlines) {
  by_name_.clear();
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [id, worker] : workers.entries()) {
    for (const v1::Reservation& reservation : worker.row.reservations()) {
      v1::Reservation& known = by_name_[reservation.name()];
      known = reservation;
      known.clear_devices();
      next = std::min(next, FromProto(reservation.until()));
    }
  }
  deadlines.Set(kDue, next);
}

std::vector<std::string> Reservations::For(const v1::JobSpec& spec) const {
  std::vector<std::string> names;
  for (const auto& [name, reservation] : by_name_) {
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

}  // namespace muster::coordinator
