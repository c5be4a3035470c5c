#include "cli/fleet.h"

#include <algorithm>
#include <map>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "cli/workers.h"
#include "proto/time.h"

namespace muster::cli {
namespace {

using Rows = std::vector<std::vector<std::string>>;

absl::StatusOr<absl::Duration> ParseTime(const std::string& flag, const std::string& text) {
  absl::Duration time;
  if (!absl::ParseDuration(text, &time) || time < absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        absl::StrCat(flag, ": '", text, "' is not a time such as 90s, 10m or 2h"));
  }
  return time;
}

// A request that names the workers.
template <typename Request>
Request About(const FleetOptions& options) {
  Request request;
  *request.mutable_workers() = {options.workers.begin(), options.workers.end()};
  return request;
}

void PrintFleet(const v1::FleetResponse& response, Format format, Terminal& terminal) {
  if (format != Format::kTable) {
    Json list = Json::array();
    for (const v1::Worker& worker : response.workers()) list.push_back(ToJson(worker));
    return Print(list, format, terminal.out);
  }
  Rows rows = {{"WORKER", "SCHEDULING", "JOBS", "REASON"}};
  for (const v1::Worker& worker : response.workers()) {
    rows.push_back({worker.name(), SchedulingText(worker),
                    worker.jobs().empty() ? "-" : absl::StrJoin(worker.jobs(), ","),
                    worker.cordon().reason().empty() ? "-" : worker.cordon().reason()});
  }
  terminal.out << Table(rows);
}

}  // namespace

absl::Status Cordon(CoordinatorClient& client, const FleetOptions& options, Format format,
                    Terminal& terminal) {
  auto request = About<v1::CordonRequest>(options);
  request.set_reason(options.reason);
  ASSIGN_OR_RETURN(const v1::FleetResponse response, client.Cordon(request));
  PrintFleet(response, format, terminal);
  return absl::OkStatus();
}

absl::Status Uncordon(CoordinatorClient& client, const FleetOptions& options, Format format,
                      Terminal& terminal) {
  auto request = About<v1::UncordonRequest>(options);
  ASSIGN_OR_RETURN(const v1::FleetResponse response, client.Uncordon(request));
  PrintFleet(response, format, terminal);
  return absl::OkStatus();
}

absl::Status Forgive(CoordinatorClient& client, const FleetOptions& options, Format format,
                     Terminal& terminal) {
  auto request = About<v1::ForgiveRequest>(options);
  ASSIGN_OR_RETURN(const v1::FleetResponse response, client.Forgive(request));
  PrintFleet(response, format, terminal);
  return absl::OkStatus();
}

absl::Status Drain(CoordinatorClient& client, const FleetOptions& options, Format format,
                   Terminal& terminal) {
  auto request = About<v1::DrainRequest>(options);
  request.set_reason(options.reason);
  if (!options.timeout.empty()) {
    ASSIGN_OR_RETURN(const absl::Duration timeout, ParseTime("--timeout", options.timeout));
    *request.mutable_timeout() = ToProto(timeout);
  }
  ASSIGN_OR_RETURN(const v1::FleetResponse response, client.Drain(request));
  PrintFleet(response, format, terminal);
  const bool move = std::any_of(response.workers().begin(), response.workers().end(),
                                [](const v1::Worker& worker) { return worker.jobs_size() > 0; });
  if (format == Format::kTable && move) {
    terminal.out << "\nJobs move after their next checkpoint; follow it with: muster events -f\n";
  }
  return absl::OkStatus();
}

absl::Status Reserve(CoordinatorClient& client, const ReserveOptions& options, absl::Time now,
                     Format format, Terminal& terminal) {
  if (options.end) {
    v1::UnreserveRequest request;
    request.set_name(options.name);
    RETURN_IF_ERROR(client.Unreserve(request).status());
    if (format != Format::kTable) {
      Print(Json{{"name", options.name}, {"ended", true}}, format, terminal.out);
    } else {
      terminal.out << "reservation " << options.name << " ended\n";
    }
    return absl::OkStatus();
  }
  v1::ReserveRequest request;
  v1::Reservation& reservation = *request.mutable_reservation();
  reservation.set_name(options.name);
  reservation.set_owner(options.owner);
  reservation.set_queue(options.queue);
  reservation.set_label(options.label);
  if (options.for_time.empty()) {
    return absl::InvalidArgumentError("--for: required, how long it lasts, such as 2h");
  }
  ASSIGN_OR_RETURN(const absl::Duration time, ParseTime("--for", options.for_time));
  *reservation.mutable_until() = ToProto(now + time);
  std::map<std::string, std::vector<std::string>> devices;
  for (const std::string& item : options.workers) {
    const size_t cut = item.find('/');
    std::vector<std::string>& of_worker = devices[item.substr(0, cut)];
    if (cut != std::string::npos) of_worker.push_back(item.substr(cut + 1));
  }
  for (const auto& [worker, names] : devices) {
    v1::ReservedDevices& one = *request.add_workers();
    one.set_worker(worker);
    *one.mutable_devices() = {names.begin(), names.end()};
  }
  ASSIGN_OR_RETURN(const v1::FleetResponse response, client.Reserve(request));
  PrintFleet(response, format, terminal);
  return absl::OkStatus();
}

absl::Status GetReservations(CoordinatorClient& client, Format format, Terminal& terminal) {
  ASSIGN_OR_RETURN(const std::vector<v1::Worker> workers, client.ListWorkers());
  struct Whole {
    v1::Reservation reservation;
    std::vector<std::string> devices;
  };
  std::map<std::string, Whole> all;
  for (const v1::Worker& worker : workers) {
    for (const v1::Reservation& reservation : worker.reservations()) {
      Whole& whole = all[reservation.name()];
      whole.reservation = reservation;
      if (reservation.devices().empty()) whole.devices.push_back(worker.name());
      for (const std::string& device : reservation.devices()) {
        whole.devices.push_back(absl::StrCat(worker.name(), "/", device));
      }
    }
  }
  if (format != Format::kTable) {
    Json list = Json::array();
    for (auto& [name, whole] : all) {
      whole.reservation.clear_devices();
      Json one = ToJson(whole.reservation);
      one["devices"] = whole.devices;
      list.push_back(std::move(one));
    }
    Print(list, format, terminal.out);
    return absl::OkStatus();
  }
  if (all.empty()) {
    terminal.out << "no reservations; `muster reserve` makes one\n";
    return absl::OkStatus();
  }
  Rows rows = {{"NAME", "FOR", "UNTIL", "OWNER", "DEVICES"}};
  for (const auto& [name, whole] : all) {
    const v1::Reservation& reservation = whole.reservation;
    rows.push_back({name,
                    reservation.queue().empty() ? absl::StrCat("label ", reservation.label())
                                                : absl::StrCat("queue ", reservation.queue()),
                    LocalTime(reservation.until()),
                    reservation.owner().empty() ? "-" : reservation.owner(),
                    absl::StrJoin(whole.devices, " ")});
  }
  terminal.out << Table(rows);
  return absl::OkStatus();
}

}  // namespace muster::cli
