#include "coordinator/log_relay.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/limits.h"

namespace muster::coordinator {

template <typename Request, typename Reply, typename Put>
void LogRelay::Send(Request request, PendingCall<Reply> call, Put put) {
  const absl::StatusOr<WorkerId> worker =
      core_.LogHolder(JobId(request.job_id()), Epoch(request.epoch()), request.rank());
  if (!worker.ok()) return calls_.Answer<Reply>(call, worker.status());
  const uint64_t number = next_request_++;
  request.set_request(number);
  const std::string log = absl::StrCat("the log of rank ", request.rank(), " of job ",
                                       request.job_id(), " is on worker ", worker->value());
  const std::optional<SessionId> session = core_.SessionOf(*worker);
  v1::FromCoordinator message;
  put(message, std::move(request));
  if (!session.has_value() || !sessions_.Send(*session, std::move(message))) {
    return calls_.Answer<Reply>(
        call, absl::UnavailableError(
                  absl::StrCat(log, ", which is not connected; see `muster get workers`")));
  }
  waiting_.emplace(number, Waiting{*session, call});
  loop_.PostAfter(kLogReplyTimeout, [this, number, log] {
    const auto waiting = waiting_.extract(number);
    if (waiting.empty()) return;
    Fail(waiting.mapped().call,
         absl::UnavailableError(absl::StrCat(log, ", which did not answer within ",
                                             absl::FormatDuration(kLogReplyTimeout))));
  });
}

void LogRelay::Ask(v1::LogRequest request, PendingCall<v1::LogReply> call) {
  Send(std::move(request), call, [](v1::FromCoordinator& message, v1::LogRequest ask) {
    *message.mutable_log() = std::move(ask);
  });
}

void LogRelay::Ask(v1::CollectivesRequest request, PendingCall<v1::CollectivesReply> call) {
  Send(std::move(request), call, [](v1::FromCoordinator& message, v1::CollectivesRequest ask) {
    *message.mutable_collectives() = std::move(ask);
  });
}

void LogRelay::Ask(v1::ProfileRequest request, PendingCall<v1::ProfileReply> call) {
  Send(std::move(request), call, [](v1::FromCoordinator& message, v1::ProfileRequest ask) {
    *message.mutable_profile() = std::move(ask);
  });
}

bool LogRelay::TakeReply(SessionId session, v1::FromWorker& message) {
  if (message.has_log()) {
    OnReply(session, std::move(*message.mutable_log()));
  } else if (message.has_collectives()) {
    OnReply(session, std::move(*message.mutable_collectives()));
  } else if (message.has_profile()) {
    OnReply(session, std::move(*message.mutable_profile()));
  } else {
    return false;
  }
  return true;
}

template <typename Reply>
void LogRelay::OnReply(SessionId session, Reply reply) {
  const auto found = waiting_.find(reply.request());
  if (found == waiting_.end() || found->second.session != session) return;
  const auto* asked = std::get_if<PendingCall<Reply>>(&found->second.call);
  if (asked == nullptr) return;
  const PendingCall<Reply> call = *asked;
  waiting_.erase(found);
  if (reply.status_code() != 0) {
    return calls_.Answer<Reply>(
        call,
        absl::Status(static_cast<absl::StatusCode>(reply.status_code()), reply.status_message()));
  }
  calls_.Answer<Reply>(call, std::move(reply));
}

void LogRelay::OnSessionClosed(SessionId session) {
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (waiting->second.session != session) {
      ++waiting;
      continue;
    }
    const AnyCall call = waiting->second.call;
    waiting = waiting_.erase(waiting);
    Fail(call, absl::UnavailableError("the worker that holds the log has disconnected; retry"));
  }
}

void LogRelay::Fail(const AnyCall& call, const absl::Status& status) {
  std::visit(
      [&]<typename Reply>(const PendingCall<Reply>& typed) { calls_.Answer<Reply>(typed, status); },
      call);
}

}  // namespace muster::coordinator
