#include <set>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "coordinator/core/core_impl.h"
#include "coordinator/core/limits.h"
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

void CoreImpl::On(const FleetEvent& event, Turn& turn) {
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
  turn.Act(std::move(reply));
}

absl::Status CoreImpl::Carry(const v1::CordonRequest& request, const FleetEvent& event,
                             Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  RETURN_IF_ERROR(CheckReason(request.reason()));
  for (const std::string& name : request.workers()) {
    Maintenance::Cordon(*workers_.Find(WorkerId(name)), {event.caller.actor, request.reason()},
                        workers_, turn);
  }
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::UncordonRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  for (const std::string& name : request.workers()) {
    maintenance_.Uncordon(*workers_.Find(WorkerId(name)), workers_, deadlines_, turn);
  }
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::ForgiveRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(workers_.CheckKnown(WorkersOf(request)));
  for (const std::string& name : request.workers()) {
    reputation::Forgive(*workers_.Find(WorkerId(name)), workers_, deadlines_, turn);
  }
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::DrainRequest& request, const FleetEvent& event, Turn& turn) {
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

void CoreImpl::CheckDrain(WorkerEntry& worker, Turn& turn) {
  for (const Maintenance::Move& move : maintenance_.Check(worker, jobs_, deadlines_, turn)) {
    attempts_.ReplaceOrStop(*jobs_.Find(move.job), worker.row.name(),
                            {v1::CAUSE_MAINTENANCE, move.why}, Departure::kToBeProven, turn);
  }
}

absl::Status CoreImpl::Carry(const v1::ReserveRequest& request, const FleetEvent&, Turn& turn) {
  if (const std::string& queue = request.reservation().queue(); !queue.empty()) {
    // One that no job can wait in would keep the devices for nobody.
    RETURN_IF_ERROR(scheduling_.tree().CheckJob(queue, v1::DEVICE_KIND_CPU, /*ranks=*/0));
  }
  RETURN_IF_ERROR(reservations_.Reserve(request, workers_, deadlines_, turn));
  states_.ReservationsChanged(turn);
  return absl::OkStatus();
}

absl::Status CoreImpl::Carry(const v1::UnreserveRequest& request, const FleetEvent&, Turn& turn) {
  RETURN_IF_ERROR(reservations_.End(request.name(), workers_, deadlines_, turn));
  states_.ReservationsChanged(turn);
  return absl::OkStatus();
}

}  // namespace muster::coordinator
